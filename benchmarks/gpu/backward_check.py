"""Checks and times the kernels of the backward on one GPU, through ctypes and torch, one kernel at a time.

Contract: `python backward_check.py LIBRARY [check] [bits] [corners] [stress] [time]`, the library of build.sh. `check`
runs a backward part by part and compares what each part wrote with a float64 product of what it read, so that the first
line that fails names the kernel; workspace and results are NaN before. `bits` compares with other kernels that must
give the same bits: the up product, the down product on transposed operands, sums written out row by row. Records go to
$OUT/backward.jsonl, a short table to stdout. Trade-off: as kernels.py, whose helpers it uses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import sys

import kernel_library as kernels
import torch
from backward_parts import (
    BIASES,
    COMBINE,
    DACT,
    DW_DOWN,
    DW_UP,
    DX,
    PARTS,
    PLAN,
    ROWS,
    SPREAD,
    WEIGHTS,
    Backward,
    make_layer,
)
from kernel_library import ACTIVATIONS, BLOCK_M, DTYPES, GATED, LAYERS, TOLERANCE, Plan, close

# T, K, H, I, experts: tails in every dimension, one and many tiles, empty experts, fewer rows than a warpgroup has.
SIZES = [
    (300, 2, 256, 128, 5),
    (77, 3, 704, 96, 3),
    (33, 2, 72, 40, 6),
    (200, 4, 2880, 328, 4),
    (700, 4, 1024, 768, 9),
    (900, 1, 640, 1536, 2),
    (513, 8, 264, 200, 64),
]


def activate_with_gradient(kind, gate, up, limit):
    """act, and its derivatives by gate and up, in float64."""
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        up = up.detach().requires_grad_() if kind in GATED else None
        act = kernels.activate(kind, gate, up, limit)
        wanted = [v for v in (gate, up) if v is not None]
        grads = torch.autograd.grad(act.sum(), wanted)
    return act.detach(), grads[0], grads[1] if up is not None else None


def zero_bits(t):
    return not t.view(torch.int16).any() if t.element_size() == 2 else not t.view(torch.int32).any()


def away_from_clamps(limit, gate, up):
    """1 where float32 and float64 agree on which side of a clamp a value is: its gradient jumps there, by itself."""
    near = torch.zeros_like(gate, dtype=torch.bool)
    if math.isfinite(limit):
        for value in (gate, *(() if up is None else (up,))):
            near |= (value.abs() - limit).abs() < 1e-5 * limit
    assert near.double().mean() < 1e-3, "the clamp hides more than a stray value"
    return ~near


# ---- one kernel at a time ---------------------------------------------------------------------------------------


def check_parts(lib):
    torch.manual_seed(11)
    for size in SIZES:
        for dtype in DTYPES:
            for n, kind in enumerate(ACTIVATIONS):
                biased = (n + size[1]) % 2 == 0
                check_layer(lib, make_layer(*size, kind, biased, packed=n % 3 != 0, dtype=dtype))
            print(f"T{size[0]} K{size[1]} H{size[2]} I{size[3]} E{size[4]} {dtype} ok", flush=True)
    check_layer(lib, make_layer(400, 3, 256, 128, 4, biased=True, capacity=90))
    print("capacity ok")


def check_layer(lib, p):
    b = Backward(lib, p)
    name = f"{p.activation} {p.dtype} T{p.t} K{p.k} H{p.h} I{p.i} E{p.l} biased {p.biases[0] is not None}"
    b.run(PLAN).run(ROWS)
    torch.cuda.synchronize()
    experts = list(b.experts())
    check_rows(name, b, experts)
    b.run(DACT)
    torch.cuda.synchronize()
    for expert in experts:
        check_dact(name, b, *expert)
    b.run(BIASES).run(DW_DOWN).run(DW_UP)
    torch.cuda.synchronize()
    for expert in experts:
        check_dw(name, b, *expert)
    check_weights(name, b)  # needs no rows
    check_dx(name, b, experts)  # overwrites the rows of dy
    whole = Backward(lib, p).run()
    torch.cuda.synchronize()
    for got, want in zip(whole.results(), b.results(), strict=True):
        assert torch.equal(got, want), f"{name}: the whole backward and its parts differ"


def check_rows(name, b, experts):
    p = b.p
    weights = b.table("row_weight", (b.capacity,), torch.float32)
    first = b.table("expert_first", (p.l,), torch.int32).tolist()
    for e, start, n, pairs in experts:
        if n == 0:
            continue
        end = start + -(-n // BLOCK_M) * BLOCK_M
        assert first[e] == start, f"{name}: expert {e} begins at {first[e]}, not {start}"
        for which, source in (("x", p.x), ("dy", p.dy)):
            rows = b.rows(which)
            assert torch.equal(rows[start : start + n], source[pairs // p.k]), f"{name}: rows of {which}"
            assert zero_bits(rows[start + n : end]), f"{name}: padding of {which}"
        assert torch.equal(weights[start : start + n], p.weights.flatten()[pairs]), f"{name}: weights of rows"
        assert zero_bits(weights[start + n : end]), f"{name}: weights of padding"


def check_dact(name, b, e, start, n, pairs):
    p = b.p
    if n == 0:
        return
    span, name = slice(start, start + n), f"{name} expert {e} rows {n}"
    x, dy = b.rows("x")[span].double(), b.rows("dy")[span].double()
    w = b.table("row_weight", (b.capacity,), torch.float32)[span].double()[:, None]
    gate = x @ p.gate[e].double() + (0 if p.biases[0] is None else p.biases[0][e].double())
    up = None
    if p.gated:
        up = x @ p.up[e].double() + (0 if p.biases[1] is None else p.biases[1][e].double())
    act, by_gate, by_up = activate_with_gradient(p.activation, gate, up, p.limit)
    d_act = dy @ p.down[e].double().T
    sure = away_from_clamps(p.limit, gate, up).to(p.dtype)
    close(f"d_gate {name}", b.rows("d_gate")[span] * sure, w * d_act * by_gate * sure)
    if p.gated:
        close(f"d_up {name}", b.rows("d_up")[span] * sure, w * d_act * by_up * sure)
    close(f"wa {name}", b.rows("wa")[span], w * act.to(p.dtype).double())
    end = start + -(-n // 64) * 64  # what the sums over rows read
    for which in ("d_gate", "d_up", "wa") if p.gated else ("d_gate", "wa"):
        assert zero_bits(b.rows(which)[start + n : end].contiguous()), f"{which} {name}: padding is not zero"
    groups = -(-p.i // 64)
    partial = b.table("partial", (groups, b.capacity), torch.float32)[:, span].double()
    products = torch.nn.functional.pad(d_act * act.to(p.dtype).double(), (0, groups * 64 - p.i))
    want = products.view(n, groups, 64).sum(-1).T
    error = (partial - want).norm() / want.norm()  # a may have been rounded the other way now and then
    assert error < TOLERANCE[p.dtype] / 4, f"partial sums of d_weights {name}: relative error {error:.3e}"


def check_dw(name, b, e, start, n, pairs):
    p = b.p
    span, name = slice(start, start + n), f"{name} expert {e} rows {n}"
    left, right = b.rows("wa")[span].double(), b.rows("dy")[span].double()
    pieces = [("dW_down", b.d_down[e], left.T @ right)]
    x = b.rows("x")[span].double()
    pieces.append(("dW_gate", b.d_gate_up[0][e], x.T @ b.rows("d_gate")[span].double()))
    if p.gated:
        pieces.append(("dW_up", b.d_gate_up[1][e], x.T @ b.rows("d_up")[span].double()))
    if p.biases[0] is not None:
        w = b.table("row_weight", (b.capacity,), torch.float32)[span].double()[:, None]
        pieces.append(("db_down", b.d_biases[2][e], (w * right).sum(0)))
        pieces.append(("db_gate", b.d_biases[0][e], b.rows("d_gate")[span].double().sum(0)))
        if p.gated:
            pieces.append(("db_up", b.d_biases[1][e], b.rows("d_up")[span].double().sum(0)))
    for which, got, want in pieces:
        if n == 0:
            assert zero_bits(got.contiguous()), f"{which} {name}: an expert without rows must have +0"
        elif want.abs().max() > 0:
            close(f"{which} {name}", got, want)


def check_weights(name, b):
    """The sums over groups in order, to the bit; with b_down a dot product more."""
    p = b.run(WEIGHTS).p
    torch.cuda.synchronize()
    groups = -(-p.i // 64)
    partial = b.table("partial", (groups, b.capacity), torch.float32)
    rows = b.table("pair_row", (p.t * p.k,), torch.int32).long()
    taken = rows >= 0
    want = torch.zeros(p.t * p.k, device=kernels.DEV)
    for g in range(groups):
        want[taken] += partial[g, rows[taken]]
    got = b.d_weights.flatten()
    assert zero_bits(got[~taken]), f"{name}: d_weights of routes that are not taken"
    if p.biases[0] is None:
        assert torch.equal(got, want), f"{name}: d_weights"
        return
    tokens, experts = torch.arange(p.t * p.k, device=kernels.DEV)[taken] // p.k, p.ids.flatten()[taken].long()
    dots = (p.dy[tokens].double() * p.biases[2][experts].double()).sum(-1)
    wanted = want[taken].double() + dots
    error = ((got[taken].double() - wanted).norm() / wanted.norm()).item() if taken.any() else 0.0
    assert error < 1e-6, f"{name}: d_weights with b_down: relative error {error:.3e}"


def check_dx(name, b, experts):
    p = b.p
    wanted = []
    for e, start, n, _ in experts:
        span = slice(start, start + n)
        want = b.rows("d_gate")[span].double() @ p.gate[e].double().T
        if p.gated:
            want += b.rows("d_up")[span].double() @ p.up[e].double().T
        wanted.append(want)
    b.run(DX)
    torch.cuda.synchronize()
    for (e, start, n, _), want in zip(experts, wanted, strict=True):
        if n:
            close(f"dx rows {name} expert {e} rows {n}", b.rows("dy")[start : start + n], want)
    b.run(COMBINE).run(SPREAD)
    torch.cuda.synchronize()
    rows = b.table("pair_row", (p.t, p.k), torch.int32).long()
    want = torch.zeros(p.t, p.h, device=kernels.DEV)
    for k in range(p.k):
        taken = rows[:, k] >= 0
        want[taken] += b.rows("dy")[rows[taken, k]].float()
    assert torch.equal(b.dx, want.to(p.dtype)), f"{name}: dx is not the sum of its rows in order"
    taken, flat = (rows >= 0).flatten(), rows.flatten()
    assert torch.equal(b.dx_rows[taken], b.rows("dy")[flat[taken]]), f"{name}: rows of d_x by route"
    assert zero_bits(b.dx_rows[~taken]), f"{name}: rows of d_x of routes that are not taken"
    none = (rows < 0).all(-1)
    assert zero_bits(b.dx[none]), f"{name}: dx of tokens without routes"


# ---- bits -------------------------------------------------------------------------------------------------------


def product(lib, a, b):
    """RN(a b) by the down product, whose bits are proven: a [m, k], b [k, n] row-major, k a multiple of 8."""
    (m, k), n = a.shape, b.shape[1]
    plan = Plan(lib, torch.zeros(m, 1, device=kernels.DEV, dtype=torch.int32), 1)
    rows, out = torch.zeros(plan.rows, k, device=kernels.DEV, dtype=a.dtype), kernels.poison((plan.rows, n), a.dtype)
    rows[:m] = a
    plan.gemm(0, rows, out, k, n, b.contiguous(), None, (k * n, n))
    return out[:m]


def padded(t, dim, multiple):
    """Zeros behind `dim` up to a multiple."""
    size = list(t.shape)
    size[dim] = -t.shape[dim] % multiple
    return torch.cat([t, t.new_zeros(size)], dim).contiguous()


def check_bits(lib):
    torch.manual_seed(12)
    for size in [(300, 2, 256, 128, 5), (77, 3, 704, 96, 3), (33, 2, 72, 40, 6), (150, 4, 264, 328, 4)]:
        for dtype in DTYPES:
            for n, kind in enumerate(ACTIVATIONS):
                check_bits_of(lib, make_layer(*size, kind, biased=n % 2 == 0, packed=n % 3 != 0, dtype=dtype, masked=0))
        print(f"bits T{size[0]} H{size[2]} I{size[3]} ok", flush=True)


def check_bits_of(lib, p):
    b = Backward(lib, p)
    for part in (PLAN, ROWS, DACT, BIASES, DW_DOWN, DW_UP):
        b.run(part)
    torch.cuda.synchronize()
    experts = list(b.experts())
    # wa has the forward's activations inside.
    plan = Plan(lib, p.ids, p.l)
    act = kernels.poison((plan.rows, p.i), p.dtype)
    bias = (None, None, 0) if p.biases[0] is None else (p.biases[0], p.biases[1], p.biases[0].stride(0))
    strides = (p.gate.stride(0), p.gate.stride(1))
    plan.gemm(1, b.rows("x"), act, p.h, p.i, p.gate, p.up, strides, bias, p.activation, p.limit)
    weight = b.table("row_weight", (b.capacity,), torch.float32)[:, None]
    sources = {}
    for e, start, n, _ in experts:
        span, steps = slice(start, start + n), slice(start, start + -(-n // 64) * 64)
        name = f"{p.activation} {p.dtype} H{p.h} I{p.i} expert {e} rows {n}"
        assert torch.equal(b.rows("wa")[span], (weight[span] * act[span].float()).to(p.dtype)), f"wa {name}"
        if n == 0:
            continue
        sums = [("dW_down", b.d_down, "wa", "dy"), ("dW_gate", b.d_gate_up[0], "x", "d_gate")]
        if p.gated:
            sums.append(("dW_up", b.d_gate_up[1], "x", "d_up"))
        for which, got, left, right in sums:
            want = product(lib, b.rows(left)[steps].T.contiguous(), b.rows(right)[steps])
            assert torch.equal(got[e], want), f"{which} {name}: not the chain of the down product"
        if p.biases[0] is not None:
            pieces = [
                (b.d_biases[0], b.rows("d_gate")[span].float()),
                (b.d_biases[2], weight[span] * b.rows("dy")[span].float()),
            ]
            if p.gated:
                pieces.append((b.d_biases[1], b.rows("d_up")[span].float()))
            for got, terms in pieces:
                want = torch.zeros_like(terms[0])
                for term in terms:
                    want = want + term
                assert torch.equal(got[e], want.to(p.dtype)), f"bias {name}: not the chain of its rows"
        # Both products of d_x in one chain, each depth rounded up to 64.
        a, w = padded(b.rows("d_gate")[span], 1, 64), padded(p.gate[e].T, 0, 64)
        if p.gated:
            a = torch.cat([a, padded(b.rows("d_up")[span], 1, 64)], 1)
            w = torch.cat([w, padded(p.up[e].T, 0, 64)], 0)
        sources[e] = product(lib, a, w)
    b.run(DX)
    torch.cuda.synchronize()
    for e, start, n, _ in experts:
        if n:
            name = f"dx {p.activation} {p.dtype} H{p.h} I{p.i} expert {e} rows {n}"
            assert torch.equal(b.rows("dy")[start : start + n], sources[e]), (
                f"{name}: not the chain of the down product"
            )


# ---- corners ----------------------------------------------------------------------------------------------------


def check_corners(lib):
    torch.manual_seed(13)
    p = make_layer(260, 4, 264, 136, 5, biased=True, masked=0)
    first = Backward(lib, p).run().results()
    for sms in (2, 6, 40):
        for got, want in zip(Backward(lib, p).run(sms=sms).results(), first, strict=True):
            assert torch.equal(got, want), f"{sms} SMs give other bits"
    # An expert's gradients depend on its own rows only: mask all routes but those of expert 2.
    only = dataclasses.replace(p, ids=torch.where(p.ids == 2, p.ids, -1))
    alone, b = Backward(lib, only).run(), Backward(lib, p).run()
    for got, want in zip((*alone.d_gate_up, alone.d_down), (*b.d_gate_up, b.d_down), strict=True):
        assert torch.equal(got[2], want[2]), "another expert's rows changed a gradient"
        assert zero_bits(got[[0, 1, 3, 4]].contiguous()), "experts without rows must have +0"
    kept = p.ids == 2
    assert torch.equal(alone.d_weights[kept], b.d_weights[kept]), "another expert's rows changed d_weights"
    split = dataclasses.replace(
        p, gate=p.gate.contiguous(), up=p.up.contiguous(), packed=False,
        biases=(p.biases[0].contiguous(), p.biases[1].contiguous(), p.biases[2]),
    )  # fmt: skip
    for got, want in zip(Backward(lib, split).run().results(), first, strict=True):
        assert torch.equal(got, want), "split weights give other bits"
    for ids in (torch.full_like(p.ids, -1), torch.full_like(p.ids, 3)):
        check_layer(lib, dataclasses.replace(p, ids=ids))
    zero = Backward(lib, dataclasses.replace(p, weights=torch.zeros_like(p.weights))).run()
    assert torch.equal(zero.d_weights, b.d_weights), "d_weights must not depend on the weights"
    assert not zero.dx.any() and not zero.d_down.any(), "weights of 0 have no other gradient"
    nan = p.x.clone()
    nan[7] = math.nan
    bad = Backward(lib, dataclasses.replace(p, x=nan)).run()
    others, mine = torch.arange(p.t, device=kernels.DEV) != 7, torch.zeros(p.l, device=kernels.DEV, dtype=torch.bool)
    mine[p.ids[7].long()] = True
    assert torch.equal(bad.dx[others], b.dx[others]) and bad.dx[7].isnan().all(), "a NaN token"
    for got, want in zip((*bad.d_gate_up, bad.d_down), (*b.d_gate_up, b.d_down), strict=True):
        assert torch.equal(got[~mine], want[~mine]), "a NaN token reached an expert that it is not routed to"
        assert got[mine].isnan().all(), "a NaN token left no NaN in its experts"
    print("corners ok", flush=True)


def check_large(lib):
    """More than 2^31 elements of rows: 320,000 of 7,168. Compared with a few tokens and one expert."""
    torch.manual_seed(14)
    p = make_layer(40000, 8, 7168, 64, 4, masked=0)
    b = Backward(lib, p).run()
    tokens = torch.linspace(0, p.t - 1, 40).long().to(kernels.DEV)
    few = dataclasses.replace(
        p, x=p.x[tokens], dy=p.dy[tokens], ids=p.ids[tokens].contiguous(), weights=p.weights[tokens].contiguous()
    )
    part = Backward(lib, few).run()
    assert torch.equal(part.dx, b.dx[tokens]) and torch.equal(part.d_weights, b.d_weights[tokens]), "large"
    for e, start, n, _ in b.experts():
        want = b.rows("x")[start : start + n].float().T @ b.rows("d_gate")[start : start + n].float()
        close(f"large dW_gate {e}", b.d_gate_up[0][e], want)
    print("large ok", flush=True)


def check_stress(lib, shapes=16, runs=6):
    """Random shapes, repeated beside a stream that keeps memory busy: any other bits are a race."""
    torch.manual_seed(15)
    noise, side = torch.empty(1 << 28, device=kernels.DEV, dtype=torch.uint8), torch.cuda.Stream()
    draw = lambda low, high: int(torch.randint(low, high + 1, ()))
    for n in range(shapes):
        size = (draw(3, 3000), draw(1, 9), 8 * draw(1, 300), 8 * draw(1, 150), draw(1, 70))
        p = make_layer(*size, list(ACTIVATIONS)[n % 6], biased=n % 2 == 0)
        b = Backward(lib, p).run()
        first = [torch.nan_to_num(r) for r in b.results()]
        for run in range(runs):
            with torch.cuda.stream(side):
                noise.add_(1)
            again = [torch.nan_to_num(r) for r in b.run().results()]
            for got, want in zip(again, first, strict=True):
                assert torch.equal(got, want), f"{size} {p.activation}: run {run} gives other bits"
    print(f"stress ok, {shapes} shapes x {runs} runs", flush=True)


# ---- times ------------------------------------------------------------------------------------------------------


def time_layers(lib, records, t=8192):
    print(f"{'layer':14s} {'ms':>8s} {'TF':>6s} | us: {' '.join(PARTS)} | TF: dact dw_down dw_up dx")
    for name, (h, i, e, k, _) in LAYERS.items():
        p = make_layer(t, k, h, i, e, masked=0)
        b = Backward(lib, p).run()
        functions = {"layer": lambda j, b=b: b.run()}
        # Rows of d_x replace those of dy, which changes no time.
        functions |= {part: lambda j, b=b, n=n: b.run(n) for part, n in PARTS.items()}
        m, states = kernels.medians(functions, rounds=4, repeats=8)
        unit = 2.0 * t * k * h * i
        us = {part: m[part] * 1e6 for part in PARTS}
        tf = {part: n * unit / m[part] * 1e-12 for part, n in (("dact", 3), ("dw_down", 1), ("dw_up", 2), ("dx", 2))}
        total = 8 * unit / m["layer"] * 1e-12
        print(
            f"{name:14s} {m['layer'] * 1e3:8.3f} {total:6.0f} | {' '.join(f'{v:.0f}' for v in us.values())} | "
            f"{' '.join(f'{v:.0f}' for v in tf.values())} MHz {states['layer']['sm_mhz']} W {states['layer']['watts']}",
            flush=True,
        )
        records.add(
            f"backward/{name}/T{t}", m["layer"] * 1e3, "ms", tflops=total, parts_us=us, parts_tflops=tf,
            gpu=states["layer"],
        )  # fmt: skip
        del b, p, functions


def main():
    lib = kernels.Library(sys.argv[1])
    what = sys.argv[2:] or ["check", "bits", "corners", "large", "stress", "time"]
    checks = {
        "check": check_parts, "bits": check_bits, "corners": check_corners, "large": check_large,
        "stress": check_stress,
    }  # fmt: skip
    for name, check in checks.items():
        if name in what:
            check(lib)
    if "time" in what:
        records = kernels.Records()
        time_layers(lib, records)
        out = pathlib.Path(os.environ.get("OUT", ".")) / "backward.jsonl"
        out.write_text("\n".join(json.dumps(r) for r in records.rows) + "\n")


if __name__ == "__main__":
    main()
