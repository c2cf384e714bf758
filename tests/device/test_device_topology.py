"""The topology manager where ranks work on devices: CUDA's devices are found in what NVML says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.fake_nvml import FakeNvml, switched
from support.gpu import Interfaced

from pycomm import Communicator, TopologyManager
from pycomm.topology.graph import State
from pycomm.topology.probes.local import probe_host
from pycomm.topology.samples import Findings

pytestmark = pytest.mark.mpi


def test_nvlink_groups_of_ranks(together: Callable[..., None], tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        gpus = switched(4)
        if comm.size > 2:
            gpus[1].links = [None] * 18

        def probe(host: str, now: float) -> Findings:
            return probe_host(host, now, tmp_path, FakeNvml(gpus))

        with TopologyManager(comm, background=False, measure=False, probe=probe) as topology:
            snapshot = topology.snapshot
            assert [place.gpu for place in snapshot.places] == [
                f"{snapshot.places[0].host}:gpu{rank}" for rank in range(comm.size)
            ]
            joined = tuple(rank for rank in range(comm.size) if rank != 1 or comm.size < 3)
            assert topology.groups("nvlink") == (joined,)
            if comm.size > 2:
                broken = snapshot.topology.gpus[1]
                assert broken.state is State.DEGRADED
                assert "all of its 18 NVLinks are down" in broken.reason
                assert broken.name in topology.explain()
            group = topology.get_group_by_tag("nvlink_local")
            assert (group is not None) == (comm.rank in joined)
            if group is not None:
                x = Interfaced(np.full(100, comm.rank, np.float32), comm.local_rank, 1)
                group.all_reduce(x)
                np.testing.assert_array_equal(x.numpy(), sum(joined))

    together(run)
