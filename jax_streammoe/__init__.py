"""jax_streammoe: Mixture-of-Experts layers for JAX whose tokens stream from router to dispatch to experts to combine.

Importing it runs no JAX operation. Names are all there is here; see README.md and docs/.
"""

from . import doctor as _doctor
from . import testing, trace
from .accumulate import accumulate_gradients
from .api import Stats, checkpoint_policy, moe
from .config import MoEConfig
from .external import include_dir, ring_attributes
from .inspection import RingState, check_program, inspect
from .layout import ring_bytes
from .publish import (
    Stream,
    StreamInfo,
    close_stream,
    open_stream,
    publish_external,
    publish_layout,
    publish_route,
)
from .reference import reference
from .ring import Ring, RingRef, RingSpec, after, close_ring, make_ring
from .routing import Routed, load_balance_loss, route_topk
from .sharding import ExpertParallel, expert_parallel
from .stream import stream_moe

doctor = _doctor.doctor

__version__ = "0.1.0"

__all__ = [
    "ExpertParallel",
    "MoEConfig",
    "Ring",
    "RingRef",
    "RingSpec",
    "RingState",
    "Routed",
    "Stats",
    "Stream",
    "StreamInfo",
    "accumulate_gradients",
    "after",
    "check_program",
    "checkpoint_policy",
    "close_ring",
    "close_stream",
    "doctor",
    "expert_parallel",
    "include_dir",
    "inspect",
    "load_balance_loss",
    "make_ring",
    "moe",
    "open_stream",
    "publish_external",
    "publish_layout",
    "publish_route",
    "reference",
    "ring_attributes",
    "ring_bytes",
    "route_topk",
    "stream_moe",
    "testing",
    "trace",
]
