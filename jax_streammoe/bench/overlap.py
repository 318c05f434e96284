"""`python -m jax_streammoe.bench.overlap`: the process of the overlap measurement; prints its times as JSON."""

from __future__ import annotations

import json

from .streaming import measure_overlap

if __name__ == "__main__":
    print(json.dumps(measure_overlap()))
