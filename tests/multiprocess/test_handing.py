"""GPU memory handed over as make_ring does it, on memfds: who maps what, hosts that differ, processes that fail or die.

Only what the compiled module asks of the CUDA driver is replaced; key-value store, barriers, sockets and descriptors
are those of a ring over GPUs.
"""

from __future__ import annotations

import pytest

from tests.helpers import processes
from tests.multiprocess import handing

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("scenario", "count"), [("share", 3), ("groups", 3), ("hosts", 2)])
def test_memory_is_handed_over(tmp_path, scenario, count):
    for output in processes.run(handing.__file__, scenario, count, tmp_path):
        assert "DONE" in output and ("EXPECTED" in output) == (scenario != "share"), output


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["fails", "dies"])
def test_a_process_whose_memory_does_not_come(tmp_path, scenario):
    outputs = processes.run(handing.__file__, scenario, 2, tmp_path)
    assert "EXPECTED" in outputs[0], outputs
    assert scenario == "dies" or all("DONE" in output for output in outputs), outputs
