"""Several hosts as one topology: nothing joined that only looks alike."""

import pytest

from pycomm import ArgumentValueError
from pycomm.topology.graph import Topology
from pycomm.topology.groups import (
    direct_pairs,
    host_groups,
    nearest_nics,
    numa_groups,
    nvlink_islands,
    rails,
)
from pycomm.topology.merge import merge
from pycomm.topology.nccl_xml import read_xml, write_xml
from pycomm.topology.smi import read_smi

XML = """<system version="1"><cpu numaid="0">
  <pci busid="0000:01:00.0" class="0x060400">
    <pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" device="0x1">
      <gpu dev="0" sm="90"><nvlink target="fffffff:ff:ff.0" count="18"/></gpu>
    </pci>
    <pci busid="0000:03:00.0" class="0x020700"><nic><net name="mlx5_0" dev="0"/></nic></pci>
  </pci></cpu></system>"""
SMI = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-3\tN/A\nGPU1\tX\tSYS\n"


def test_hosts_side_by_side() -> None:
    one, two = read_xml(XML, host="a"), read_xml(XML, host="b")
    both = merge([one, two])
    assert [gpu.name for gpu in both.gpus] == ["a:gpu0", "b:gpu0"]
    assert host_groups(both) == numa_groups(both) == (("a:gpu0",), ("b:gpu0",))
    assert rails(both) == (("a:mlx5_0", "b:mlx5_0"),)
    found = nearest_nics(both)["b:gpu0"]
    assert found is not None
    assert found.nics == ("b:mlx5_0",)
    assert Topology.from_json(both.to_json()) == both


def test_a_hidden_switch_is_not_shared_because_it_looks_the_same() -> None:
    both = merge([read_xml(XML, host="a"), read_xml(XML, host="b")])
    assert nvlink_islands(both) == (("a:gpu0",), ("b:gpu0",))
    assert direct_pairs(both) is True


def test_different_sources_and_what_they_do_not_know() -> None:
    both = merge([read_smi(SMI, host="a"), read_xml(XML, host="b")])
    assert both.unknown_names("numa").keys() == {"a:GPU0"}
    assert both.notes[0].startswith("a: nvidia-smi topo -m, line 3: a row GPU1 without a column")
    assert rails(both) == (("a:NIC0", "b:mlx5_0"),)
    with pytest.raises(ArgumentValueError, match="the place of a:GPU0"):
        write_xml(both)


def test_a_host_comes_once() -> None:
    with pytest.raises(ArgumentValueError, match="two parts of the topology are named a"):
        merge([read_xml(XML, host="a"), read_xml(XML, host="a")])
    with pytest.raises(ArgumentValueError, match="without a host"):
        merge([Topology()])
    assert merge([]) == Topology()
