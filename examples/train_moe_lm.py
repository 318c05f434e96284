"""Trains a decoder-only Mixture-of-Experts language model: scan over layers, remat, optax, orbax, expert parallelism.

    python examples/train_moe_lm.py                      1.3 billion parameters in bfloat16, over all GPUs it sees
    python examples/train_moe_lm.py --devices 4          without a GPU: a small model on 4 virtual devices, a minute
    python examples/train_moe_lm.py --checkpoint DIR     saves as it goes; again with --resume: goes on from there
    python examples/train_moe_lm.py --processes 2 --process-id I --gpus I --coordinator HOST:PORT    once per process

Contract: leaves with 0 if the loss fell below that of the first step, else with 1. A run that was resumed has the
losses of one that was not, on as many ranks bit for bit: batches are a function of the step, and the checkpoint holds
all else; a ring is made anew. All processes are on one host. Experts and sequences are split over the ranks, everything
else is replicated. Parameters are float32 and cast in each layer. Trade-off: the text is the help of this Python,
nothing is fetched, so a large model learns it by heart.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streammoe as sm
from jax_streammoe.demo import data

LAYERS = ("stream", "moe", "reference")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The model and its batches. `sequences` per rank; `chunks` of whole sequences in a streamed call."""

    moe: sm.MoEConfig
    num_layers: int
    heads: int
    length: int
    sequences: int
    chunks: int = 4
    rate: float = 3e-4
    balance: float = 0.01
    warmup: int = 20


def full() -> Settings:
    config = sm.MoEConfig(num_experts=64, top_k=8, hidden=2048, intermediate=768, dtype=jnp.bfloat16)
    return Settings(config, num_layers=4, heads=16, length=1024, sequences=16)


def small(dtype: Any = jnp.float32) -> Settings:
    config = sm.MoEConfig(num_experts=8, top_k=2, hidden=64, intermediate=64, dtype=dtype, block_m=32)
    return Settings(config, num_layers=2, heads=4, length=32, sequences=8, rate=3e-3, warmup=5)


# The model. Parameters of all layers are stacked, for scan; expert tensors are the only ones of rank 4.


class Produced(NamedTuple):
    """What the producer hands back beside the routes: the residual stream, and what the balance loss needs."""

    residual: jax.Array
    probs: jax.Array
    ids: jax.Array


def init_params(s: Settings, key: jax.Array) -> dict[str, Any]:
    n, h, i, e = s.num_layers, s.moe.hidden, s.moe.intermediate, s.moe.num_experts
    shapes = {
        "embed": ((data.NUM_BYTES, h), 1.0),
        "position": ((s.length, h), 0.1),
        "head": ((h, data.NUM_BYTES), 0.1 * h**-0.5),
        "qkv": ((n, h, 3 * h), h**-0.5),
        "out": ((n, h, h), (2 * n * h) ** -0.5),
        "router": ((n, h, e), h**-0.5),
        "w_gate_up": ((n, e, h, s.moe.gate_up_width), h**-0.5),
        "w_down": ((n, e, i, h), (2 * n * i) ** -0.5),
    }
    keys = jax.random.split(key, len(shapes))
    params: dict[str, Any] = {
        name: scale * jax.random.normal(k, shape)
        for k, (name, (shape, scale)) in zip(keys, shapes.items(), strict=True)
    }
    layers = {name: params.pop(name) for name in ("qkv", "out", "router", "w_gate_up", "w_down")}
    layers |= {name: jnp.ones((n, h)) for name in ("norm_attention", "norm_experts")}
    return params | {"layers": layers, "norm": jnp.ones(h)}


def sharding_of(mesh: Mesh, array: Any) -> NamedSharding:
    return NamedSharding(mesh, P(None, "ep") if array.ndim == 4 else P())


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale.reshape(*(1,) * (x.ndim - 1), -1)).astype(x.dtype)


def produce(s: Settings, x_c: jax.Array, p: dict[str, jax.Array]) -> sm.Routed:
    """The producer of the experts' input: x_c [..., H] of whole sequences -> attention, routes, tokens to dispatch.

    It runs on the whole batch, or on one chunk of a stream while experts work on the last one.
    """
    x = x_c.reshape(-1, s.length, s.moe.hidden)
    qkv = rms_norm(x, p["norm_attention"]) @ p["qkv"].astype(x.dtype)
    q, k, v = jnp.split(qkv.reshape(*x.shape[:2], s.heads, -1), 3, axis=-1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"].astype(x.dtype)
    tokens = rms_norm(x, p["norm_experts"])
    routed = sm.route_topk(jnp.dot(tokens.astype(jnp.float32), p["router"]), s.moe)
    routed = jax.tree.map(lambda a: a.reshape(*x_c.shape[:-1], -1), routed)
    return routed._replace(x=tokens.reshape(x_c.shape), aux=Produced(x.reshape(x_c.shape), routed.aux, routed.ids))


def block(s: Settings, ep: sm.ExpertParallel, layer: str, x: jax.Array, ring: Any, p: dict[str, jax.Array]) -> tuple:
    """x [B, length, H] -> the same of the next layer, the ring, the layer's balance loss."""
    p = dict(p)
    experts = [p.pop(name).astype(s.moe.dtype) for name in ("w_gate_up", "w_down")]
    if layer == "stream":
        route = functools.partial(produce, s)
        y, ring, info = ep.stream(x, route, *experts, ring=ring, route_args=(p,), chunks=s.chunks)
        made = info.aux
    else:
        routed = produce(s, x, p)
        made = routed.aux
        if layer == "moe":
            y, ring, _ = ep.moe(routed.x, routed.ids, routed.weights, *experts, ring=ring)
        else:
            y = sm.reference(routed.x, routed.ids, routed.weights, *experts, config=s.moe)
    return made.residual + y, ring, sm.load_balance_loss(made.probs, made.ids, s.moe.num_experts)


def loss(
    params: dict[str, Any], batch: jax.Array, ring: Any, s: Settings, ep: sm.ExpertParallel, layer: str
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    """Bytes [B, length + 1] -> what is minimised, (cross-entropy in nats per byte, the ring)."""
    x = (params["embed"][batch[:, :-1]] + params["position"][None]).astype(s.moe.dtype)

    # The layer's output and routes are saved, all else is computed again: a ring is used up by its call.
    @functools.partial(jax.checkpoint, policy=sm.checkpoint_policy())
    def body(carry: tuple, p: dict[str, jax.Array]) -> tuple:
        *carry, balance = block(s, ep, layer, *carry, p)
        return tuple(carry), balance

    (x, ring), balance = lax.scan(body, (x, ring), params["layers"])
    logits = jnp.dot(rms_norm(x, params["norm"]).astype(jnp.float32), params["head"])
    entropy = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))
    return entropy + s.balance * jnp.mean(balance), (entropy, ring)


# Training.


class Trainer:
    """Parameters, optimiser state and ring, which every step donates and replaces."""

    def __init__(self, s: Settings, mesh: Mesh, num_steps: int, layer: str = "stream", ring_name: str = "train"):
        if layer == "reference" and mesh.size > 1:
            raise SystemExit("--layer reference runs on one device")
        self.settings, self.mesh = s, mesh
        ep = sm.expert_parallel(s.moe, mesh=mesh)
        tokens = s.sequences * s.length
        self.ring: Any = None
        if layer != "reference":
            options = dict(chunk_tokens=tokens // s.chunks, num_slots=s.chunks, mesh=mesh, name=ring_name)
            self.ring = sm.make_ring(s.moe, **options)
        rate = optax.warmup_cosine_decay_schedule(0.1 * s.rate, s.rate, s.warmup, max(num_steps, s.warmup + 1))
        self.optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))

        def init(key: jax.Array) -> tuple:
            params = init_params(s, key)
            return params, self.optimiser.init(params)

        shapes = jax.eval_shape(init, jax.random.key(0))
        self.shardings = jax.tree.map(functools.partial(sharding_of, mesh), shapes)
        self.state = jax.jit(init, out_shardings=self.shardings)(jax.random.key(0))
        step = functools.partial(_step, s, ep, layer, self.optimiser)
        self._step = jax.jit(step, donate_argnums=(0, 2), out_shardings=(self.shardings, None, None))

    def step(self, batch: np.ndarray) -> float:
        """One step on the bytes [B, length + 1] of all ranks; returns the batch's loss before it, once it is done."""
        sharding = NamedSharding(self.mesh, P("ep"))
        placed = jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
        self.state, value, self.ring = self._step(self.state, placed, self.ring)
        return float(value)

    def batches(self, text: np.ndarray, first: int = 0) -> Any:
        """Batches from step `first` on: the same ones in every process and after every restart."""
        s = self.settings
        return itertools.islice(data.batches(text, s.sequences * self.mesh.size, s.length, seed=0), first, None)

    def close(self) -> None:
        if self.ring is not None:
            sm.close_ring(self.ring)


def _step(
    s: Settings, ep: sm.ExpertParallel, layer: str, optimiser: Any, state: tuple, batch: jax.Array, ring: Any
) -> tuple:
    params, moments = state
    (_, (entropy, ring)), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, ring, s, ep, layer)
    updates, moments = optimiser.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), entropy, ring


class Checkpoints:
    """Saves and restores (parameters and optimiser state, loss of the first step) in a folder; None: does nothing."""

    def __init__(self, folder: pathlib.Path | None, every: int):
        self.manager: Any = None
        if folder is None:
            return
        import orbax.checkpoint as ocp

        self.ocp, self.every = ocp, every
        self.manager = ocp.CheckpointManager(folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def begin(self, trainer: Trainer, resume: bool) -> tuple[int, float | None]:
        """-> the step to go on with, and the loss of the first step if there was one."""
        if resume:
            return self._restore(trainer)
        if self.manager is not None and self.manager.latest_step() is not None:
            raise SystemExit(f"--checkpoint: {self.manager.directory} holds a run; --resume it, or give another folder")
        return 0, None

    def _restore(self, trainer: Trainer) -> tuple[int, float | None]:
        step = None if self.manager is None else self.manager.latest_step()
        if step is None:
            raise SystemExit("--resume: there is no checkpoint; give the folder of one with --checkpoint")
        wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), trainer.state)
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(trainer.mesh, P()))
        args = self.ocp.args.StandardRestore({"state": wanted, "first_loss": scalar})
        restored = self.manager.restore(step, args=args)
        trainer.state = restored["state"]
        return step, float(restored["first_loss"])

    def save(self, trainer: Trainer, step: int, first_loss: float, *, last: bool) -> None:
        """After `step` steps; waits for the copy, since the next step donates what is saved."""
        if self.manager is None or not (last or step % self.every == 0) or step == self.manager.latest_step():
            return
        whole = NamedSharding(trainer.mesh, P())
        scalar = jax.make_array_from_callback((), whole, lambda _: np.float32(first_loss))
        self.manager.save(step, args=self.ocp.args.StandardSave({"state": trainer.state, "first_loss": scalar}))
        self.manager.wait_until_finished()


def train(trainer: Trainer, num_steps: int, saved: Checkpoints, *, resume: bool, log_every: int, stop: int) -> bool:
    """Runs to step `num_steps`, or `stop`; returns whether the loss fell below that of the first step."""
    s, chief = trainer.settings, jax.process_index() == 0
    first, first_loss = saved.begin(trainer, resume)
    text, _ = data.split(data.load_text(None)[1])
    tokens = s.sequences * trainer.mesh.size * s.length
    recent: list[float] = []
    since, last = None, min(num_steps, stop)
    for n, batch in zip(range(first, last), trainer.batches(text, first), strict=False):
        value = trainer.step(batch)
        first_loss = value if first_loss is None else first_loss
        recent = [*recent[-9:], value]
        if since is None:  # the first step compiles
            since, done = time.perf_counter(), n + 1
            speed = "compiled"
        else:
            speed = f"{tokens * (n + 1 - done) / (time.perf_counter() - since):,.0f} tokens/s"
        if chief and (n % log_every == 0 or n == last - 1):
            print(f"step {n}: loss {value:.9g} nats per byte, {speed}", flush=True)
        saved.save(trainer, n + 1, first_loss, last=n == last - 1)
    if not recent or first_loss is None:
        raise SystemExit(f"nothing to do: {first} of {last} steps are done")
    mean = float(np.mean(recent[-max(1, min(10, (last - first) // 4)) :]))
    if chief:
        print(f"loss {first_loss:.4f} at the first step, {mean:.4f} in the last ones", flush=True)
    return mean < first_loss


def at_least(least: int) -> Any:
    """A type of arguments: an int from `least` on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--small", action="store_true", help="the model for CPUs, on a GPU too")
    add("--layer", choices=LAYERS, default="stream", help="experts streamed, batch-ready, or in plain JAX")
    add("--steps", type=at_least(2), default=200, help="steps of the whole run, which the learning rate is planned for")
    add("--stop", type=at_least(1), default=2**31, help="leave after this step; --resume goes on")
    add("--devices", type=at_least(1), default=1, help="virtual CPU devices of this process")
    add("--checkpoint", type=pathlib.Path, help="folder of checkpoints, the same for all processes")
    add("--checkpoint-every", type=at_least(1), default=100, help="steps")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--log-every", type=at_least(1), default=10, help="steps")
    add("--processes", type=at_least(1), default=1, help="how many processes the run has, this one among them")
    add("--process-id", type=at_least(0), default=0, help="which of them this one is, from 0")
    add("--coordinator", default="127.0.0.1:9876", help="HOST:PORT of process 0")
    add("--gpus", type=int, nargs="+", help="numbers of this process's GPUs among several; by default all it sees")
    options = parser.parse_args(arguments)
    if options.process_id >= options.processes:
        parser.error(f"--process-id must be below --processes, got {options.process_id} of {options.processes}")
    folder = options.checkpoint
    if folder is not None and folder.exists() and not folder.is_dir():
        parser.error(f"--checkpoint must be a folder, {folder} is not")
    if options.resume and (folder is None or not folder.is_dir()):
        parser.error("--resume needs --checkpoint with the folder of a run")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    jax.config.update("jax_num_cpu_devices", options.devices)  # before the first operation
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process_id, local_device_ids=options.gpus
        )
    on_cpu = jax.devices()[0].platform == "cpu"
    settings = small(jnp.float32 if on_cpu else jnp.bfloat16) if options.small or on_cpu else full()
    mesh = Mesh(np.array(jax.devices()), ("ep",), axis_types=(AxisType.Auto,))
    if settings.moe.num_experts % mesh.size:
        raise SystemExit(f"the {settings.moe.num_experts} experts cannot be split over {mesh.size} ranks")
    trainer = Trainer(settings, mesh, options.steps, options.layer)
    if jax.process_index() == 0:
        count = sum(a.size for a in jax.tree.leaves(trainer.state[0]))
        print(f"{count:,} parameters, {mesh.size} rank(s) of {jax.devices()[0].device_kind}", flush=True)
    try:
        saved = Checkpoints(options.checkpoint, options.checkpoint_every)
        fell = train(
            trainer, options.steps, saved, resume=options.resume, log_every=options.log_every, stop=options.stop
        )
    finally:
        trainer.close()
    return 0 if fell else 1


if __name__ == "__main__":
    raise SystemExit(main())
