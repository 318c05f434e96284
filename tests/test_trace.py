"""`sm.trace`: what is recorded of a streamed call, in which order, and that the saved file is a Chrome trace.

Proves that every phase of the protocol appears once per rank and chunk, that a chunk is dispatched after all its owners
published it and computed after it is dispatched, that recording is off unless asked for, and that nothing is lost or
shifted when events are written. The demonstration's derived "produce" phases are checked on hand-made events.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streammoe as sm
from jax_streammoe.demo import timeline
from jax_streammoe.trace import Event

NUM_CHUNKS = 3
CFG = sm.MoEConfig(4, 2, 16, 16, dtype=jnp.float32, block_m=8)
TOKENS = 24  # per rank; three chunks of 8, 24 rows per local expert and wave or more: as many waves as chunks


@pytest.fixture(scope="module")
def recorded(mesh_of):
    """Events of one streamed call per (ranks, policy), recorded once."""

    @functools.cache
    def record(num_ranks: int, policy: str) -> list[Event]:
        rng = np.random.default_rng(0)
        mesh, name = mesh_of(num_ranks), f"trace_{num_ranks}_{policy}"
        ep = sm.expert_parallel(CFG, mesh=mesh)
        shapes = ((TOKENS * num_ranks, 16), (16, 4), (4, 16, 32), (4, 16, 16))
        x, w_router, w_gate_up, w_down = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)

        @functools.partial(jax.jit, donate_argnames="ring")
        def call(ring):
            y, ring, _ = ep.stream(
                x, lambda x_c, w: sm.route_topk(x_c @ w, CFG), w_gate_up, w_down, ring=ring, route_args=(w_router,),
                chunks=NUM_CHUNKS, policy=policy,
            )  # fmt: skip
            return y, ring

        with sm.make_ring(CFG, chunk_tokens=8, num_slots=4, mesh=mesh, name=name) as ring:
            _, ring = jax.block_until_ready(call(ring))
            with sm.trace.record() as events:
                _, ring = jax.block_until_ready(call(ring))
            _, ring = jax.block_until_ready(call(ring))  # not recorded: would double every count
        return events

    return record


CASES = [(1, "serial"), (2, "serial"), pytest.param(4, "overlap", marks=pytest.mark.core)]


def of(events: list[Event], phase: str, rank: int | None = None) -> list[Event]:
    return [e for e in events if e.phase == phase and rank in (None, e.rank)]


@pytest.mark.parametrize(("num_ranks", "policy"), CASES)
def test_every_phase_of_every_rank_and_chunk_is_recorded_once(recorded, num_ranks, policy):
    events = recorded(num_ranks, policy)
    assert {e.ring for e in events} == {f"trace_{num_ranks}_{policy}"}
    assert {e.group for e in events} == {0}
    for rank in range(num_ranks):
        for phase in ("publish_route", "publish_layout", "dispatch"):
            assert [(e.chunk, e.last_chunk) for e in of(events, phase, rank)] == [(n, n) for n in range(NUM_CHUNKS)]
        for phase in ("open", "close", "combine", "done"):
            assert len(of(events, phase, rank)) == 1, phase
        covered = [n for e in of(events, "experts", rank) for n in range(e.chunk, e.last_chunk + 1)]
        assert covered == list(range(NUM_CHUNKS))
    counted = {"open", "close", "combine", "done", "publish_route", "publish_layout", "dispatch", "experts"}
    assert {e.phase for e in events} == counted


@pytest.mark.parametrize(("num_ranks", "policy"), CASES)
def test_the_order_of_the_protocol_shows(recorded, num_ranks, policy):
    events = recorded(num_ranks, policy)
    assert events == sorted(events, key=lambda e: e.begin_s)
    assert all(e.begin_s <= e.end_s for e in events)
    for rank in range(num_ranks):
        opened, closed = of(events, "open", rank)[0], of(events, "close", rank)[0]
        assert all(opened.begin_s <= e.begin_s for e in events if e.rank == rank)
        assert all(e.end_s <= closed.end_s for e in events if e.rank == rank)
        for wave in of(events, "experts", rank):
            dispatched = [e for e in of(events, "dispatch", rank) if wave.chunk <= e.chunk <= wave.last_chunk]
            assert max(e.end_s for e in dispatched) <= wave.begin_s
        assert of(events, "experts", rank)[-1].end_s <= of(events, "combine", rank)[0].begin_s
    if policy == "overlap":  # in "serial" a dispatch runs inside the publication that makes its wave complete
        for e in of(events, "dispatch"):
            halves = of(events, "publish_route") + of(events, "publish_layout")
            published = [p for p in halves if p.chunk == e.chunk]
            assert len(published) == 2 * num_ranks
            assert max(p.begin_s for p in published) <= e.end_s


def test_nothing_is_recorded_unless_asked_for(recorded):
    recorded(1, "serial")
    sm.trace.start()
    assert sm.trace.stop() == []
    assert sm.trace.stop() == []


def test_start_forgets_what_was_recorded_before(mesh_of):
    with sm.make_ring(CFG, chunk_tokens=8, num_slots=2, name="trace_restart") as ring:
        call = jax.jit(
            lambda x, w, v, ring: sm.stream_moe(
                x, lambda x_c: sm.route_topk(x_c[:, :4], CFG), w, v, ring=ring, config=CFG, chunks=None
            )[:2],
            donate_argnums=3,
        )
        x, w, v = jnp.ones((16, 16)), jnp.ones((4, 16, 32)), jnp.ones((4, 16, 16))
        sm.trace.start()
        _, ring = jax.block_until_ready(call(x, w, v, ring))
        sm.trace.start()
        _, ring = jax.block_until_ready(call(x, w, v, ring))
        events = sm.trace.stop()
    assert len(of(events, "open")) == 1
    assert {e.chunk for e in of(events, "publish_route")} == {0, 1}


@pytest.mark.core
def test_saved_file_is_a_chrome_trace(recorded, tmp_path):
    events = recorded(4, "overlap")
    path = sm.trace.save(events, tmp_path / "trace.json")
    assert path == tmp_path / "trace.json"
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    origin = events[0].begin_s
    assert len(spans) == len(events)
    for span, e in zip(spans, events, strict=True):
        assert (span["name"], span["cat"], span["pid"]) == (e.phase, e.ring, e.group)
        assert span["args"] == {"chunk": e.chunk, "last_chunk": e.last_chunk, "rank": e.rank}
        np.testing.assert_allclose([span["ts"], span["dur"]], [(e.begin_s - origin) * 1e6, (e.end_s - e.begin_s) * 1e6])
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert set(rows.values()) == {f"rank {r} {side}" for r in range(4) for side in ("producer", "consumer")}
    for span in spans:
        side = "consumer" if span["name"] in ("dispatch", "experts", "done") else "producer"
        assert rows[span["tid"]] == f"rank {span['args']['rank']} {side}"


def test_no_events_make_an_empty_trace():
    assert sm.trace.to_chrome([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_produce_phases_fill_the_gaps_between_publications():
    def event(phase: str, chunk: int, begin: float, end: float, rank: int = 0) -> Event:
        return Event("ring", 0, rank, phase, chunk, chunk, begin, end)

    events = [
        event("open", -1, 0.0, 1.0), event("publish_layout", 0, 2.0, 2.5), event("publish_route", 0, 3.0, 4.0),
        event("publish_route", 1, 9.0, 10.0), event("open", -1, 5.0, 6.0, rank=1),
        event("publish_route", 0, 7.0, 8.0, rank=1),
    ]  # fmt: skip
    produced = [e for e in timeline.with_producer(events) if e.phase == "produce"]
    assert [(e.rank, e.chunk, e.begin_s, e.end_s) for e in produced] == [
        (0, 0, 1.0, 3.0),
        (0, 1, 4.0, 9.0),
        (1, 0, 6.0, 7.0),
    ]
    assert len(timeline.with_producer(events)) == len(events) + 3
