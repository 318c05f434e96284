"""The layer with gate and up kept for its backward, inside jit on one H200, against the layer that computes them again.

Contract: run as `python benchmarks/gpu/backward_kept.py --out FILE` with the library importable; writes a list of
records `layer_bwd_kept/1gpu/SHAPE/T8192` in ms as benchmarks/README.md describes them: the backward alone, from what a
forward kept before, with the backward that computes gate and up again, the forward that keeps them, the forward that
does not, and the bytes kept beside it. Gradients are checked first, on part of the batch, as in backward.py, and timed
as there. Trade-off: the parts are called below `sm.moe`, because its gradient is a forward and a backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from backward import CALLS, check, gradients, in_turns
from layer import PREFILL, SHAPES, make, power_and_clock

import jax_streammoe as sm
from jax_streammoe import local, ops
from jax_streammoe.bench.measure import record


def versions(config: sm.MoEConfig) -> dict[str, Any]:
    """name -> function of dy, a batch (x, ids, weights, gate_up) and the experts; all of its work is in its results."""
    spec = ops.LayerSpec(config, config.num_experts)

    def corner(arrays: Any) -> list[jax.Array]:
        return [a[:1, :1, :128] for a in arrays]

    def from_kept(dy: Any, x: Any, ids: Any, weights: Any, gate_up: Any, *experts: Any) -> Any:
        packed = ops.pack_experts(*experts, None, None)
        token = jnp.zeros((1, 1), jnp.float32)
        _, dx, d_weights, d_experts = local.backward(spec, token, x, dy, ids, weights, packed, gate_up=gate_up)
        return dx, d_weights, corner(d for d, e in zip(d_experts, packed, strict=True) if e.ndim == 3)

    def again(dy: Any, x: Any, ids: Any, weights: Any, gate_up: Any, *experts: Any) -> Any:
        del gate_up
        layer = functools.partial(sm.moe, config=config)
        dx, d_weights, *d_experts = gradients(layer, dy, x, ids, weights, *experts)
        return dx, d_weights, corner(d_experts)

    def keeping(dy: Any, x: Any, ids: Any, weights: Any, gate_up: Any, *experts: Any) -> Any:
        del dy, gate_up
        y, kept, _, _ = local.forward_kept(spec, x, ids, weights, ops.pack_experts(*experts, None, None))
        return y, kept[:1, :128]

    def plain(dy: Any, x: Any, ids: Any, weights: Any, gate_up: Any, *experts: Any) -> Any:
        del dy, gate_up
        return sm.moe(x, ids, weights, *experts, config=config)

    return {"kept": from_kept, "again": again, "forward_keeping": keeping, "forward": plain}


def timed(config: sm.MoEConfig, args: tuple, dy: jax.Array) -> dict[str, float]:
    """Median seconds of one call of each version; versions take turns, calls different tokens."""
    x, ids, weights, *experts = args
    spec = ops.LayerSpec(config, config.num_experts)
    keep = jax.jit(lambda *args: local.forward_kept(spec, *args[:3], ops.pack_experts(*args[3:], None, None))[1])
    batches = []
    for n in range(CALLS):
        tokens = (jnp.roll(x, n, axis=1), jnp.roll(ids, n, axis=0), weights)
        batches.append((*tokens, keep(*tokens, *experts)))
    programs = {
        name: jax.jit(lambda dy, batches, experts, run=run: [run(dy, *batch, *experts) for batch in batches])
        for name, run in versions(config).items()
    }
    launch = {name: functools.partial(run, dy, batches, experts) for name, run in programs.items()}
    return in_turns(launch, dict.fromkeys(launch, CALLS))


def measure(name: str, revision: str) -> dict:
    config, args = make(SHAPES[name], PREFILL)
    dy = jax.random.normal(jax.random.key(5), args[0].shape, jnp.bfloat16)
    check(config, args, dy, save_gate_up=True)
    ms = {version: seconds * 1e3 for version, seconds in timed(config, args, dy).items()}
    kept_bytes = PREFILL * config.top_k * config.gate_up_width * config.itemsize
    baselines = {f"{version}_ms": value for version, value in ms.items() if version != "kept"}
    baselines |= {"kept_bytes": float(kept_bytes)}
    print(name, f"{ms['kept']:.3f} ms", {k: round(v, 3) for k, v in baselines.items()}, power_and_clock(), flush=True)
    return record(f"layer_bwd_kept/1gpu/{name}/T{PREFILL}", ms["kept"], "ms", baselines, jnp.bfloat16, 1, revision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--commit", default="", help="of the measured tree, where it is not a git checkout")
    options = parser.parse_args()
    records: list[dict] = []
    for name in options.shapes:
        records.append(measure(name, options.commit))
        options.out.write_text(json.dumps(records, indent=1) + "\n")  # what is done stays when the run is cut short


if __name__ == "__main__":
    main()
