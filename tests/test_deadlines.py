"""A rank that stalls or fails: every other rank gets an error within the deadline that says who, where and what for.

The ring is terminal then, other rings work, and after make_ring the same compiled program runs again. Faults are set
per ring, rank and phase; deadlines are short. JAX raises the error of one device, and the ring keeps the first
reason: both must say the same thing.
"""

from __future__ import annotations

import itertools
import re
import time

import jax
import jax.numpy as jnp
import pytest

import jax_streammoe as sm
from tests.helpers import oracle, ranks

R, DEADLINE = 3, 0.4
BROKEN = "is unusable, make_ring again on all ranks"
names = (f"deadline-{n}" for n in itertools.count())


class Layer:
    """A streamed layer over R ranks with its own ring, a deadline and the right answer."""

    def __init__(self, rng, policy="serial", timeout_s=DEADLINE):
        self.problem = oracle.make_problem(rng, T=R * 13, H=16, I=24, E=6, K=2, dtype=jnp.float32, block_m=8)
        self.mesh, self.name, self.timeout_s = ranks.mesh_of(R), next(names), timeout_s
        self.want, _ = ranks.one_device(self.problem.config)(*self.problem.args)
        self.mode = f"{policy}-packed"
        self.make()
        self.good()  # compiles

    def make(self):
        self.ring = sm.make_ring(
            self.problem.config, mesh=self.mesh, chunk_tokens=4, num_slots=2, name=self.name, timeout_s=self.timeout_s
        )

    def good(self):
        y, self.ring, _ = ranks.run(self.problem, self.mesh, self.mode, self.ring)
        ranks.assert_bits(y, self.want)

    def bad(self):
        """Runs and must raise; -> exception text, seconds, the reason that the ring keeps."""
        begin = time.monotonic()
        with pytest.raises((RuntimeError, ValueError)) as error:
            ranks.run(self.problem, self.mesh, self.mode, self.ring)
        seconds = time.monotonic() - begin
        return str(error.value), seconds, sm.inspect(self.ring).failure

    def compiled(self):
        return ranks.program(self.problem.config, self.mesh, self.mode)._cache_size()

    def recovers(self):
        """Terminal now; works after make_ring, without compiling anything again."""
        with pytest.raises(RuntimeError, match=re.escape(BROKEN.replace("make_ring", "call make_ring"))):
            self.ring.check()
        sm.testing.clear_faults()
        before = self.compiled()
        self.make()
        for _ in range(2):
            self.good()
        assert self.compiled() == before
        sm.close_ring(self.name)


@pytest.fixture
def other(rng):
    """A ring beside, which must not notice."""
    layer = Layer(rng)
    yield layer
    layer.good()
    layer.ring.check()
    sm.close_ring(layer.name)


@pytest.fixture(autouse=True)
def no_faults_left():
    yield
    sm.testing.clear_faults()


# phase that goes silent -> phase in which peers miss it
MISSED_IN = {
    "open": {"dispatch"}, "publish_route": {"dispatch"}, "publish_layout": {"dispatch"},
    "dispatch": {"publish_route", "publish_layout", "done"}, "experts": {"done"}, "done": {"done"},
    }  # fmt: skip
WAITED = re.compile(
    r"rank (\d) waited ([\d.]+) s for rank (\d) in phase (\w+), slot (\d): sequence wanted (\d+), seen (\d+); "
    r"that rank died, stalls, or runs another program. The ring is unusable: make_ring again on all ranks"
)


@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize("phase", [p for p in sm.testing.PHASES if p not in ("close", "combine")])
def test_a_silent_rank_is_named_within_the_deadline(rng, other, phase, policy):
    layer, victim = Layer(rng, policy), 1
    sm.testing.add_fault(layer.name, phase, "drop", rank=victim)
    text, seconds, reason = layer.bad()
    # Peers may wait for a peer that waits for the victim: two deadlines, and what a busy machine adds.
    assert DEADLINE * 0.9 <= seconds < 2 * DEADLINE + 5
    found = list(WAITED.finditer(text + reason))
    assert WAITED.search(reason), reason
    for match in found:
        rank, waited, peer, seen_in, slot, wanted, seen = match.groups()
        assert int(rank) != victim and int(peer) == victim and seen_in in MISSED_IN[phase]
        assert float(waited) == pytest.approx(DEADLINE)
        assert int(slot) < 2 and int(wanted) > int(seen)
    assert layer.name in text and (WAITED.search(text) or "injected fault" in text), text
    layer.recovers()


@pytest.mark.parametrize("policy", ["serial", "overlap"])
@pytest.mark.parametrize("phase", sm.testing.PHASES)
def test_peers_of_a_failing_rank_get_its_text(rng, phase, policy):
    layer, victim = Layer(rng, policy, timeout_s=30), 2
    sm.testing.add_fault(layer.name, phase, "fail", rank=victim)
    text, seconds, reason = layer.bad()
    why = f"injected fault: rank {victim} of ring '{layer.name}' stops in phase {phase}"
    assert seconds < 10  # nobody waits for the deadline
    # Of the victim, of a peer that it stopped, or of a peer that came late.
    forms = (f"ABORTED: {why}", f"because rank {victim} failed: {why}", f"it failed with: {why}")
    assert text.endswith(why) and any(form in text for form in forms), text
    assert reason == why or reason.endswith(forms[1]), reason
    layer.recovers()


def test_a_stall_longer_than_the_deadline(rng, other):
    layer = Layer(rng)
    sm.testing.add_fault(layer.name, "publish_layout", "delay", rank=0, seconds=3 * DEADLINE)
    text, _, reason = layer.bad()
    assert WAITED.search(reason).group(3, 4) == ("0", "dispatch") and WAITED.search(text), (text, reason)
    layer.recovers()


def test_a_stall_shorter_than_the_deadline_is_nothing(rng):
    layer = Layer(rng, timeout_s=20)
    sm.testing.add_fault(layer.name, "publish_layout", "delay", rank=0, seconds=0.02)
    layer.good()
    layer.ring.check()
    sm.close_ring(layer.name)


@pytest.mark.core
def test_a_terminal_ring_refuses_and_keeps_its_reason(rng):
    layer = Layer(rng, timeout_s=30)
    with sm.testing.fault(layer.name, "experts", "fail", rank=0):
        text, _, _ = layer.bad()
    why = f"injected fault: rank 0 of ring '{layer.name}' stops in phase experts"
    assert why in text
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"it failed with: .*{re.escape(why)}"):
            layer.ring.check()
    assert why in sm.inspect(layer.ring).failure
    assert f"failed: {sm.inspect(layer.ring).failure}" in str(sm.inspect(layer.ring))
    layer.recovers()


def test_ranks_of_different_plans_are_told_both(rng):
    # Rank 0 cuts its tokens otherwise than its peers: two calls in one program, chosen by rank.
    layer = Layer(rng, timeout_s=5)
    config, problem = layer.problem.config, layer.problem
    tokens, experts = jax.P("ep"), jax.P("ep")

    def rank(x, ids, weights, w1, w2, ring):
        def call(chunks):
            def run(ring):
                args = dict(config=config, ring=ring, token_args=(ids, weights), policy="serial")
                y, ring, _ = sm.stream_moe(x, ranks.given, w1, w2, chunks=chunks, **args)
                return y, ring

            return run

        return jax.lax.cond(jax.lax.axis_index("ep") == 0, call(4), call(2), ring)

    program = jax.shard_map(
        rank, mesh=layer.mesh, in_specs=(tokens,) * 3 + (experts,) * 2 + (tokens,), out_specs=tokens
    )
    ring = sm.make_ring(config, mesh=layer.mesh, chunk_tokens=8, num_slots=2, name=layer.name, timeout_s=5)
    with pytest.raises((RuntimeError, ValueError), match=r"disagree about the (routing|layout) of chunk 0") as error:
        jax.block_until_ready(jax.jit(program, donate_argnums=5)(*problem.args, ring))
    assert "all ranks must run the same calls on the ring, in the same order" in str(error.value)
    assert re.search(r"\(sequence, call, chunk, plan\) wanted \(1, 0, 0, \d+\), got \(1, 0, 0, \d+\)", str(error.value))
    sm.close_ring(layer.name)


def test_closing_a_ring_in_use_ends_its_call(rng, mesh_of):
    """A rank that finds no ring must not leave its peers to their deadline."""
    mesh, config = mesh_of(2), sm.MoEConfig(4, 2, 32, 16, dtype=jnp.float32, block_m=16)
    ring = sm.make_ring(config, chunk_tokens=8, num_slots=1, mesh=mesh, name="closed-in-use", timeout_s=60)
    ep = sm.expert_parallel(config, mesh=mesh)
    x = jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 4, (16, 2)), jnp.int32)
    weights = jnp.ones((16, 2), jnp.float32)
    experts = (jnp.ones((4, 32, 32), jnp.float32), jnp.ones((4, 16, 32), jnp.float32))
    f = jax.jit(lambda x, ring: ep.moe(x, ids, weights, *experts, ring=ring)[0], donate_argnums=1)
    begin = time.monotonic()
    with sm.testing.fault("closed-in-use", "publish_layout", "delay", rank=0, seconds=3.0):
        y = f(x, ring)
        time.sleep(1.0)  # rank 1 waits for rank 0 by now
        assert sm.close_ring("closed-in-use")
        with pytest.raises(Exception, match="closed"):
            y.block_until_ready()
    assert time.monotonic() - begin < 30
