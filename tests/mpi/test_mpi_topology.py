"""The topology manager on the ranks of an MPI job."""

import os

import numpy as np

from pycomm import TopologyManager


def test_one_decides_and_all_adopt(comm, together):
    def look(comm):
        with TopologyManager(comm, interval=0.05, overhead=1.0, ttl=5) as topology:
            assert topology.groups("host") == (tuple(range(comm.size)),)
            x = np.zeros(1000, np.float32)
            for number in range(300):
                x[:] = comm.rank
                comm.all_reduce(x)
                assert x[0] == comm.size * (comm.size - 1) / 2
                if number % 100 == 0:
                    told = comm.all_gather_object((topology.snapshot.hash, topology.epoch))
                    assert len(set(told)) == 1
            pairs = [(pair.a, pair.b) for pair in topology.snapshot.pairs]
            assert pairs == [(a, b) for a in range(comm.size) for b in range(a + 1, comm.size)]
            node = topology.group("host")
            assert node.all_reduce(np.ones(1))[0] == comm.size
            assert "1 host, told apart by boot id" in topology.explain()

    together(look)


def test_no_process_is_started(comm, together, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process was started")

    def look(comm):
        for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system"):
            monkeypatch.setattr(os, name, refuse)
        with TopologyManager(comm, interval=0.02) as topology:
            for _ in range(50):
                comm.barrier()
            topology.refresh(thorough=True)

    together(look)
