"""What a machine is made of, how it is, and which groups follow from that.

`graph` holds the records, `smi` and `nccl_xml` read them from what the tools of vendors print,
`groups` and `clusters` draw conclusions, and `health` turns samples into states: all of that is
pure. `probes` look at this host, and at pairs of ranks. `manager` puts it together for the ranks of
a job; it is `pycomm.TopologyManager`.
"""

from pycomm.topology.graph import Gpu, Host, Link, LinkKind, Nic, NumaNode, State, Switch, Topology
from pycomm.topology.merge import merge
from pycomm.topology.nccl_xml import read_xml, write_xml
from pycomm.topology.smi import read_smi

__all__ = [
    "Gpu",
    "Host",
    "Link",
    "LinkKind",
    "Nic",
    "NumaNode",
    "State",
    "Switch",
    "Topology",
    "merge",
    "read_smi",
    "read_xml",
    "write_xml",
]
