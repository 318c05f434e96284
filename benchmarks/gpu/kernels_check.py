"""Checks of the forward's kernels: against a Python loop and float64, in corners, and beside other work.

Contract: `check_all` and `check_stress` raise an AssertionError that names the first thing that is wrong.
"""

from __future__ import annotations

import math

import torch
from kernel_library import ACTIVATIONS, BLOCK_M, DEV, DTYPES, GATED, Plan, activate, close, forward, poison, random_ids


def expected_plan(ids, num_experts, first, total):
    flat = ids.flatten().cpu().tolist()
    local = [i - first if 0 <= i < total and 0 <= i - first < num_experts else -1 for i in flat]
    invalid = sum(1 for i in flat if i < -1 or i >= total)
    rows = [0] * num_experts
    for e in local:
        if e >= 0:
            rows[e] += 1
    blocks, starts = [], []
    for e, r in enumerate(rows):
        starts.append(len(blocks) * BLOCK_M)
        n = -(-r // BLOCK_M)
        blocks += [[e, starts[e] // BLOCK_M, n, r]] * n
    row_pair, pair_row, nxt = [-1] * (len(blocks) * BLOCK_M), [-1] * len(flat), list(starts)
    for p, e in enumerate(local):
        if e >= 0:
            pair_row[p], row_pair[nxt[e]] = nxt[e], p
            nxt[e] += 1
    return row_pair, pair_row, blocks, rows, [len(blocks), sum(rows), invalid]


def check_plan(lib):
    gen = torch.Generator(device="cpu").manual_seed(1)
    cases = [
        (1, 1, 1, 0, 1),
        (7, 2, 4, 0, 4),
        (1000, 8, 128, 0, 128),
        (4096, 8, 32, 32, 128),
        (8192, 8, 512, 0, 512),
        (3000, 6, 1024, 0, 1024),
        (33, 8, 3, 1, 8),
        (70000, 4, 16, 0, 16),
    ]
    for t, k, l, first, total in cases:
        ids = torch.randint(-2, total + 1, (t, k), generator=gen, dtype=torch.int32)
        check_one_plan(lib, ids, l, first, total)
    check_one_plan(lib, torch.full((600, 8), 2, dtype=torch.int32), 4, 0, 4)
    check_one_plan(lib, torch.full((600, 8), -1, dtype=torch.int32), 4, 0, 4)
    print("plan ok")


def check_one_plan(lib, ids, l, first, total):
    plan = Plan(lib, ids.to(DEV), l, first, total)
    row_pair, pair_row, blocks, rows, totals = expected_plan(ids, l, first, total)
    assert plan.table(4, 3).tolist() == totals, (plan.table(4, 3).tolist(), totals)
    assert plan.table(3, l).tolist() == rows
    assert plan.table(1, len(pair_row)).tolist() == pair_row
    assert plan.table(0, len(row_pair)).tolist() == row_pair
    assert plan.table(2, 4 * len(blocks)).reshape(len(blocks), 4).tolist() == blocks


def check_gemms(lib):
    torch.manual_seed(2)
    sizes = [
        (256, 128, 5, 300, 2),
        (704, 96, 3, 77, 3),
        (2880, 2880, 4, 200, 2),
        (72, 40, 6, 500, 4),
        (1024, 768, 9, 700, 4),
        (2048, 1536, 2, 900, 1),
    ]
    for dtype in DTYPES:
        worst = 0.0
        for h, i, l, t, k in sizes:
            for kind in ACTIVATIONS:
                for biased in (False, True):
                    worst = max(worst, check_gemm_case(lib, h, i, l, t, k, kind, biased, dtype))
        print(f"gemm {dtype} ok, worst relative error {worst:.2e}")


def check_gemm_case(lib, h, i, l, t, k, kind, biased, dtype):
    gated = kind in GATED
    columns = 2 * i if gated else i
    limit = {"swiglu": 1.5 if biased else math.inf, "swigluoai": 7.0}.get(kind, math.inf)
    plan = Plan(lib, random_ids(t, k, l), l)
    x = torch.randn(t, h, device=DEV).to(dtype)
    w = (torch.randn(l, h, columns, device=DEV) / math.sqrt(h)).to(dtype)
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).to(dtype)
    b = torch.randn(l, columns, device=DEV).to(dtype)
    b_down = torch.randn(l, h, device=DEV).to(dtype)
    rows, act, out = poison((plan.rows, h), dtype), poison((plan.rows, i), dtype), poison((plan.rows, h), dtype)
    lib.call("sm_gather", plan.workspace, x, rows, t, k, l, h)
    up = (
        h,
        i,
        w,
        w[:, :, i:] if gated else None,
        (h * columns, columns),
        (b, b[:, i:] if gated else None, columns) if biased else (None, None, 0),
        kind,
        limit,
    )
    down = (i, h, w_down, None, (i * h, h), (b_down, None, h) if biased else (None, None, 0))
    gathered, scattered = poison((plan.rows, i), dtype), poison((t * k, h), dtype)
    plan.gemm(1, rows, act, *up)
    plan.gemm(1, x, gathered, *up, by_pair=1)
    plan.gemm(0, act, out, *down)
    plan.gemm(0, act, scattered, *down, by_pair=1)
    torch.cuda.synchronize()
    assert scattered[plan.table(1, t * k) < 0].isnan().all(), "scattering wrote the row of a route that is not taken"
    pairs = plan.table(0, int(plan.table(4, 1)) * BLOCK_M)
    counts, start, worst = plan.table(3, l).tolist(), 0, 0.0
    for e, n in enumerate(counts):
        span = slice(start, start + n)
        start += -(-n // BLOCK_M) * BLOCK_M
        if n == 0:
            continue
        token = (pairs[span] // k).long()
        assert torch.equal(rows[span], x[token]), "gather"
        assert torch.equal(act[span], gathered[span]), "gathered rows give other bits"
        assert torch.equal(out[span], scattered[pairs[span].long()]), "scattered rows have other bits"
        pre = x[token].double() @ w[e].double() + (b[e].double() if biased else 0)
        want = activate(kind, pre[:, :i], pre[:, i:], limit)
        name = f"{kind} H{h} I{i} expert {e} rows {n} bias {biased}"
        worst = max(worst, close("up " + name, act[span], want))
        want = act[span].double() @ w_down[e].double() + (b_down[e].double() if biased else 0)
        worst = max(worst, close("down " + name, out[span], want))
    return worst


def check_forward(lib):
    torch.manual_seed(3)
    for t, k, h, i, l in [
        (1, 8, 2048, 768, 128),
        (17, 4, 704, 96, 8),
        (1000, 8, 1024, 768, 128),
        (513, 9, 256, 136, 4),
        (50, 40, 264, 128, 64),
    ]:
        for dtype in DTYPES:
            check_forward_case(lib, t, k, h, i, l, dtype)


def check_forward_case(lib, t, k, h, i, l, dtype):
    x = torch.randn(t, h, device=DEV).to(dtype)
    w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).to(dtype)
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).to(dtype)
    ids = random_ids(t, k, l)
    ids[t // 2] = -1 if t > 1 else ids[t // 2]
    weights = torch.rand(t, k, device=DEV)
    weights[ids < 0] = math.nan
    if t > 1:
        x[t // 2] = math.nan  # a masked token's values reach nothing
    y = forward(lib, x, ids, weights, w, w_down)
    want = torch.zeros(t, h, device=DEV, dtype=torch.float64)
    for j in range(k):
        for e in ids[:, j].unique().tolist():
            if e < 0:
                continue
            s = (ids[:, j] == e).nonzero().flatten()
            pre = x[s].double() @ w[e].double()
            act = activate("swiglu", pre[:, :i], pre[:, i:], math.inf).to(dtype).double()
            want[s] += weights[s, j, None].double() * (act @ w_down[e].double()).to(dtype).double()
    error = close(f"forward {dtype} T{t} H{h}", y, want)
    if t > 1:
        assert (y[t // 2].view(torch.int16) == 0).all(), "a token without routes must be +0"
    # Bits do not depend on the company a token keeps, nor on the run.
    assert torch.equal(y, forward(lib, x, ids, weights, w, w_down)), "run to run"
    for mode in (1, 2):
        assert torch.equal(y, forward(lib, x, ids, weights, w, w_down, gather=mode)), "fused or separate gather"
    part = torch.arange(0, t, 3, device=DEV)
    some = forward(lib, x[part].contiguous(), ids[part].contiguous(), weights[part].contiguous(), w, w_down)
    assert torch.equal(some, y[part]), "bits depend on the batch"
    print(f"forward {dtype} T{t} K{k} H{h} I{i} E{l} ok, relative error {error:.2e}")


def check_overflow(lib):
    """float16 rows beyond 65504 become infinite in the product and in combine; subnormals stay."""
    t, k, h, i, l = 200, 2, 256, 128, 4
    plan = Plan(lib, random_ids(t, k, l, masked=0), l)
    pairs, valid = plan.table(0, plan.rows), torch.zeros(plan.rows, device=DEV, dtype=torch.bool)
    valid[plan.table(1, t * k).long()] = True
    act = torch.full((plan.rows, i), 64.0, device=DEV, dtype=torch.float16)
    signs = torch.tensor([1.0, -1.0], device=DEV).repeat(h // 2)
    for value, want in ((16.0, math.inf), (2.0**-14, 0.5), (2.0**-24, 64.0 * 128 * 2.0**-24)):
        w_down = (signs * value).half().expand(l, i, h).contiguous()
        out, scattered = poison((plan.rows, h), torch.float16), poison((t * k, h), torch.float16)
        plan.gemm(0, act, out, i, h, w_down, None, (i * h, h))
        plan.gemm(0, act, scattered, i, h, w_down, None, (i * h, h), by_pair=1)
        assert torch.equal(out[valid].double(), (signs.double() * want).expand(t * k, h)), f"rows of {value}"
        assert torch.equal(scattered[pairs[valid].long()], out[valid]), f"scattered rows of {value}"
    rows = torch.zeros(plan.rows, h, device=DEV, dtype=torch.float16)
    for value, want in ((60000.0, math.inf), (2.0**-24, 2.0**-23)):
        y = poison((t, h), torch.float16)
        rows[valid] = value
        lib.call("sm_combine", plan.workspace, rows, torch.ones(t, k, device=DEV), y, t, k, l, h, DTYPES[y.dtype])
        assert (y.double() == want).all(), f"combine of {value}"
    print("overflow and subnormals ok")


def check_corners(lib):
    """No taken route at all; every route to one expert; and more than 2^31 elements of rows."""
    torch.manual_seed(4)
    t, k, h, i, l = 300, 8, 256, 128, 16
    x, weights = torch.randn(t, h, device=DEV).bfloat16(), torch.rand(t, k, device=DEV)
    w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).bfloat16()
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).bfloat16()
    none = torch.full((t, k), -1, device=DEV, dtype=torch.int32)
    assert (forward(lib, x, none, weights, w, w_down).view(torch.int16) == 0).all()
    check_sample(lib, x, torch.full_like(none, 3), weights, w, w_down)
    t, h, i, l = 40000, 7168, 64, 4  # 320,000 rows of 7168: 2.3e9 elements
    x, weights = torch.randn(t, h, device=DEV).bfloat16(), torch.rand(t, k, device=DEV)
    w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).bfloat16()
    w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).bfloat16()
    check_sample(lib, x, random_ids(t, k, l), weights, w, w_down)
    print("corners ok")


def check_sample(lib, x, ids, weights, w, w_down, count=40):
    y = [forward(lib, x, ids, weights, w, w_down, gather=mode) for mode in (1, 2)]
    assert torch.equal(y[0], y[1]), "fused or separate gather"
    i = w_down.shape[1]
    tokens = torch.linspace(0, x.shape[0] - 1, count).long().tolist()
    want = torch.zeros(count, x.shape[1], device=DEV, dtype=torch.float64)
    for n, t in enumerate(tokens):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                pre = x[t].double() @ w[e].double()
                act = activate("swiglu", pre[:i], pre[i:], math.inf).bfloat16().double()
                want[n] += weights[t, j].double() * (act @ w_down[e].double()).bfloat16().double()
    close("sampled tokens", y[0][tokens], want)


def check_stress(lib, shapes=24, runs=8):
    """Random shapes, repeated beside a stream that keeps memory busy: any other bits are a race."""
    torch.manual_seed(5)
    noise = torch.empty(1 << 28, device=DEV, dtype=torch.uint8)
    side = torch.cuda.Stream()
    draw = lambda low, high: int(torch.randint(low, high + 1, ()))
    for _ in range(shapes):
        t, k, h, i, l = draw(1, 3000), draw(1, 9), 8 * draw(1, 300), 8 * draw(1, 150), draw(1, 70)
        x, weights = torch.randn(t, h, device=DEV).bfloat16(), torch.rand(t, k, device=DEV)
        w = (torch.randn(l, h, 2 * i, device=DEV) / math.sqrt(h)).bfloat16()
        w_down = (torch.randn(l, i, h, device=DEV) / math.sqrt(i)).bfloat16()
        ids = random_ids(t, k, l)
        y = forward(lib, x, ids, weights, w, w_down, gather=1)
        for run in range(runs):
            with torch.cuda.stream(side):
                noise.add_(1)
            again = forward(lib, x, ids, weights, w, w_down, gather=1 + run % 2)
            assert torch.equal(y, again), f"T{t} K{k} H{h} I{i} E{l}: run {run} gives other bits"
    print(f"stress ok, {shapes} shapes x {runs} runs")


def check_all(lib):
    check_plan(lib)
    check_gemms(lib)
    check_forward(lib)
    check_overflow(lib)
    check_corners(lib)
