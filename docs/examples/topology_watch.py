"""A job that goes by its topology: calls in a loop, and a line and a picture whenever plans change.

    pycomm run -n 4 docs/examples/topology_watch.py --seconds 30 --plot topology.png

Needs matplotlib for the picture. On several hosts, slow a link meanwhile and watch.
"""

import argparse
import time

import numpy as np

import pycomm
from pycomm import TopologyManager


def main():
    """Read the command line and run the loop."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    with (
        pycomm.init() as comm,
        TopologyManager(comm, interval=options.interval, overhead=0.05) as topology,
    ):
        if comm.rank == 0:
            print(topology.explain(), flush=True)

        def changed(_, after):
            if comm.rank != 0:
                return
            print(f"epoch {after.epoch}", flush=True)
            for link in after.topology.links:
                if link.reason:
                    print(f"  {link.a} - {link.b} is {link.state}: {link.reason}", flush=True)
            draw(after)

        def draw(snapshot):
            if options.plot and comm.rank == 0:
                from pycomm.topology.plot import plot

                plot(snapshot, options.plot)

        draw(topology.snapshot)
        topology.on_change(changed)
        x = np.ones(1 << 18, np.float32)
        ends = np.array([time.monotonic() + options.seconds])
        comm.broadcast(ends)  # rank 0's clock is everybody's
        late = np.zeros(1, np.int32)
        while not late[0]:
            comm.all_reduce(x, op="avg")
            late[0] = comm.rank == 0 and time.monotonic() > ends[0]
            comm.broadcast(late)


if __name__ == "__main__":
    main()
