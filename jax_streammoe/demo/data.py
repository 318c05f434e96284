"""Real text as bytes: where it comes from, how it is split, how a batch is drawn, what a model must beat.

Contract: the last tenth of a text is held out and never trained on. Batches depend on a seed only.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator

import numpy as np

MIN_BYTES = 8192
NUM_BYTES = 256


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line."""


def load_text(path: str | None) -> tuple[str, np.ndarray]:
    """Returns (where it comes from, bytes as uint8 [n]): a file, or by default the help texts of this Python.

    Raises InputError when the file is missing, unreadable, empty or shorter than MIN_BYTES.
    """
    if path is None:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError:
            raise InputError("this Python has no pydoc_data.topics to learn from: give a file with --text") from None
        data, origin = "\n\n".join(topics[name] for name in sorted(topics)).encode(), "pydoc_data.topics"
    else:
        origin = path
        try:
            data = pathlib.Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"--text {path}: {error.strerror or error}") from None
        if not data:
            raise InputError(f"--text {path}: the file is empty")
    if len(data) < MIN_BYTES:
        raise InputError(f"--text {origin}: {len(data)} bytes are too few to learn from, give at least {MIN_BYTES}")
    return origin, np.frombuffer(data, np.uint8)


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training part, held-out part)."""
    cut = len(text) - len(text) // 10
    return text[:cut], text[cut:]


def batches(text: np.ndarray, sequences: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yields int32 [sequences, length + 1] windows at random places, without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, sequences)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def unigram_bits(text: np.ndarray) -> float:
    """Entropy of the text's byte frequencies, in bits per byte: the best that a model without context can do."""
    counts = np.bincount(text, minlength=NUM_BYTES)
    p = counts[counts > 0] / len(text)
    return float(-(p * np.log2(p)).sum())
