"""`python -m jax_streammoe [demo|doctor|bench|trace]`: a demonstration, what was built, measurements, a timeline.

Exit status: 0 fine, 1 a result is not what it must be, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from . import __version__

COMMANDS = ("demo", "doctor", "bench", "trace")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; without a command, `demo`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0] not in COMMANDS and words[0] not in ("-h", "--help", "--version")):
        words = ["demo", *words]
    parser = _parser()
    args = parser.parse_args(words)
    try:
        return args.run(parser, args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_streammoe", description="Mixture-of-Experts layers whose tokens stream."
    )
    parser.add_argument("--version", action="version", version=f"jax_streammoe {__version__}")
    commands = parser.add_subparsers(metavar="{demo,doctor,bench,trace}")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    demo = command("demo", _demo, "train a language model through a streamed layer and examine it (the default)")
    demo.add_argument("--text", metavar="FILE", help="learn from this file instead of Python's own help texts")
    demo.add_argument("--steps", type=_positive, default=800, help="training steps (default: 800)")
    command("doctor", _doctor, "say what was built and what this machine can do")
    bench = command("bench", _bench, "measure, and compare with the targets")
    bench.add_argument("cases", nargs="*", metavar="CASE", help="names of cases (default: all)")
    bench.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/cpu.json"), metavar="FILE")
    trace = command("trace", _trace, "record one streamed call, untrained, as picture and Chrome trace")
    for sub in (demo, trace):
        sub.add_argument("--devices", type=_positive, default=4, metavar="N", help="virtual CPU devices (default: 4)")
        sub.add_argument("--out", type=pathlib.Path, default=pathlib.Path("streammoe_out"), metavar="DIR")
    return parser


def _demo(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from . import demo

    _check_devices(parser, args.devices)
    try:
        return demo.run(args.text, args.devices, args.steps, args.out)
    except demo.data.InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _trace(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from . import demo

    _check_devices(parser, args.devices)
    try:
        return demo.run_trace(args.devices, args.out)
    except demo.data.InputError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _doctor(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from .doctor import doctor

    table = Table("what", "", "seen", title=f"jax_streammoe {__version__}", title_justify="left")
    for finding in doctor():
        table.add_row(finding.what, "[green]yes" if finding.ok else "[yellow]no", finding.detail)
    Console().print(table)
    return 0


def _bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from . import bench

    for case in args.cases:
        if case not in bench.CASES:
            parser.error(f"CASE must be one of {', '.join(bench.CASES)}, got {case}")
    return 1 if bench.run(args.out, args.cases) else 0


def _check_devices(parser: argparse.ArgumentParser, num_devices: int) -> None:
    from .demo.model import CHUNKS, CONFIG, SEQUENCES

    if CONFIG.num_experts % num_devices or SEQUENCES % (num_devices * CHUNKS):
        parser.error(f"--devices must divide the model's {CONFIG.num_experts} experts, got {num_devices}")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
