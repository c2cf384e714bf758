"""The picture of a node with eight GPUs that is made up; needs matplotlib.

    python docs/examples/topology_picture.py node.png

The node comes from a matrix as ``nvidia-smi topo -m`` prints it; rates and states, which a matrix
does not have, are added.
"""

import argparse
import sys
from dataclasses import replace

from pycomm.topology import LinkKind, State, read_smi
from pycomm.topology.plot import plot

GPUS = 8


def matrix():
    """Return what ``nvidia-smi topo -m`` prints on a node with eight GPUs, NICs and NVSwitches."""
    gpus = [f"GPU{n}" for n in range(GPUS)]
    nics = [f"NIC{n}" for n in range(GPUS)]
    lines = ["\t".join(["", *gpus, *nics, "CPU Affinity", "NUMA Affinity"])]
    for row in range(GPUS):
        cells = ["X" if row == column else "NV18" for column in range(GPUS)]
        for column in range(GPUS):
            far = "NODE" if row // 4 == column // 4 else "SYS"
            cells.append("PIX" if row == column else far)
        socket = row // 4
        cpus = f"{56 * socket}-{56 * socket + 55}"
        lines.append("\t".join([gpus[row], *cells, cpus, str(socket)]))
    lines += ["", "NIC Legend:", "", *(f"  NIC{n}: mlx5_{n}" for n in range(GPUS))]
    return "\n".join(lines)


def node():
    """Return the node, with the rates that its matrix does not tell, and one NIC that is down."""
    topology = read_smi(matrix(), host="node1")
    links = tuple(
        replace(link, state=State.UP, bandwidth=450e9 if link.count else 63e9)
        for link in topology.links
    )
    nics = [
        replace(nic, fabric=LinkKind.IB, bandwidth=50e9, state=State.UP) for nic in topology.nics
    ]
    nics[6] = replace(nics[6], state=State.DOWN, reason="the port is Down, physically Polling")
    gpus = tuple(replace(gpu, state=State.UP) for gpu in topology.gpus)
    return replace(topology, gpus=gpus, nics=tuple(nics), links=links)


def main():
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file")
    plot(node(), parser.parse_args().file)


if __name__ == "__main__":
    sys.exit(main())
