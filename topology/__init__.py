"""What a machine is made of, and which groups follow from that.

`graph` holds the records, `smi` and `nccl_xml` read them from what the tools of vendors print, and
`groups` draws conclusions. All of it is pure: text in, records out.
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
