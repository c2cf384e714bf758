"""Network interfaces from /sys: adapters, bonds, and all that only looks like them."""

import errno
from pathlib import Path

import pytest
from support.sysfs import fail_reading, grow, interface, port

from pycomm.topology.graph import LinkKind, Nic, State, Topology
from pycomm.topology.probes.net import probe_net
from pycomm.topology.samples import Findings


def _probe(root: Path) -> Findings:
    found = probe_net("h", 7.0, root)
    assert Topology.from_json(found.topology.to_json()) == found.topology
    assert [(sample.subject, sample.state, sample.reason) for sample in found.samples] == [
        (nic.name, nic.state, nic.reason) for nic in found.topology.nics if not nic.virtual
    ]
    return found


def _only(root: Path) -> Nic:
    (nic,) = _probe(root).topology.nics
    return nic


def _bond(*slaves: str) -> dict[str, str]:
    folder = "devices/virtual/net/bond0"
    said = {"carrier": "1", "operstate": "up", "flags": "0x1403", "speed": "50000"}
    return {
        "class/net/bonding_masters": "bond0",
        "class/net/bond0": f"-> ../../{folder}",
        f"{folder}/bonding/slaves": " ".join(slaves),
        **{f"{folder}/{name}": text for name, text in said.items()},
    }


def test_no_interfaces(tmp_path: Path) -> None:
    found = _probe(tmp_path)
    assert (found.topology.nics, found.topology.notes) == ((), ())


def test_an_adapter(tmp_path: Path) -> None:
    grow(tmp_path, interface("eth0", "pci0000:00/0000:00:03.0/virtio2"))
    nic = _only(tmp_path)
    assert (nic.name, nic.fabric, nic.state) == ("eth0", LinkKind.TCP, State.UP)
    assert (nic.bus_id, nic.bandwidth, nic.virtual) == ("0000:00:03.0", 3.125e9, False)


def test_the_place_of_an_interface_that_is_no_link(tmp_path: Path) -> None:
    function = "devices/pci0000:00/0000:00:05.0"
    grow(tmp_path, {function: None, "class/net/eth0/device": f"-> ../../../{function}"})
    assert _only(tmp_path).bus_id == "0000:00:05.0"


def test_what_has_no_device_is_virtual_and_the_loopback_nothing(tmp_path: Path) -> None:
    names = ("lo", "docker0", "veth12ab", "eth0", "bond1")
    grow(tmp_path, {
        **{f"class/net/{name}": f"-> ../../devices/virtual/net/{name}" for name in names},
        **{f"devices/virtual/net/{name}/carrier": "1" for name in names},
        "devices/virtual/net/bond1/bonding/slaves": "",
    })  # fmt: skip
    found = _probe(tmp_path)
    virtual = [(nic.name, nic.virtual) for nic in found.topology.nics]
    assert virtual == [("bond1", True), ("docker0", True), ("eth0", True), ("veth12ab", True)]
    assert found.samples == ()


@pytest.mark.parametrize(
    ("said", "state", "reason"),
    [
        ({"carrier": "0", "operstate": "down"}, State.DOWN, "no carrier: the cable or the peer"),
        ({"flags": "0x1002"}, State.DOWN, "administratively down"),
        ({"operstate": "unknown"}, State.UP, ""),
        ({"operstate": "dormant"}, State.DOWN, 'says "dormant"'),
        ({"operstate": "lowerlayerdown"}, State.DOWN, "built on is down"),
        ({"operstate": "down"}, State.UNKNOWN, 'carrier says "1", but'),
        ({"operstate": "\x01\x02"}, State.UNKNOWN, r'says "\x01\x02"'),
        ({"carrier": "yes"}, State.UP, ""),
        ({"carrier": "yes", "operstate": "unknown"}, State.UNKNOWN, 'carrier says "yes"'),
        ({"flags": "?"}, State.UP, ""),
    ],
)
def test_states(tmp_path: Path, said: dict[str, str], state: State, reason: str) -> None:
    nic = _only(grow(tmp_path, interface("eth0", **said)))
    assert nic.state is state
    assert reason in nic.reason
    assert bool(nic.reason) == bool(reason)


def test_an_interface_that_nobody_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path, interface("eth0", flags="0x1002", operstate="down"))
    fail_reading(monkeypatch, {"/carrier": errno.EINVAL, "/speed": errno.EINVAL})
    nic = _only(tmp_path)
    assert (nic.state, nic.bandwidth) == (State.DOWN, None)
    assert nic.reason.endswith("eth0/flags says 0x1002")
    fail_reading(monkeypatch, {"/flags": errno.EACCES})
    nic = _only(tmp_path)
    assert nic.state is State.DOWN
    assert "administratively down" in nic.reason
    assert "carrier cannot be read: EINVAL (Invalid argument)" in nic.reason
    fail_reading(monkeypatch, {"/operstate": errno.EACCES})
    assert _only(tmp_path).state is State.UNKNOWN


def test_an_interface_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    grow(
        tmp_path, {"class/net/eth0": "-> ../../devices/gone/net/eth0", "class/net/eth1/device": ""}
    )
    nics = _probe(tmp_path).topology.nics
    assert [(nic.name, nic.state, nic.virtual) for nic in nics] == [
        ("eth0", State.UNKNOWN, True),
        ("eth1", State.UNKNOWN, True),
    ]


@pytest.mark.parametrize("speed", ["-1", "0", "", "4294967295", "fast", "99999999999999999999999"])
def test_speeds_that_are_none(tmp_path: Path, speed: str) -> None:
    assert _only(grow(tmp_path, interface("eth0", speed=speed))).bandwidth is None


def test_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "devices/pci0000:00/0000:00:03.0/net/eth0"
    counts = {"rx_errors": "5", "tx_errors": "0", "rx_crc_errors": "4", "rx_missed_errors": "99"}
    grow(tmp_path, interface("eth0", carrier_changes="12"))
    grow(tmp_path, {f"{folder}/statistics/{name}": text for name, text in counts.items()})
    fail_reading(monkeypatch, {"/tx_errors": errno.EIO})
    found = _probe(tmp_path)
    assert found.samples[0].counters == (
        ("rx_errors", 5), ("rx_crc_errors", 4), ("carrier_changes", 12),
    )  # fmt: skip
    (note,) = found.topology.notes
    assert note.endswith("eth0/statistics: left out tx_errors: EIO (Input/output error)")


def test_a_bond(tmp_path: Path) -> None:
    two = "pci0000:00/0000:00:04.0"
    files = {**interface("eth0"), **interface("eth1", two), **_bond("eth0", "eth1")}
    nics = {nic.name: nic for nic in _probe(grow(tmp_path, files)).topology.nics}
    bond = nics["bond0"]
    assert (bond.state, bond.virtual, bond.bandwidth) == (State.UP, False, 6.25e9)
    assert bond.attributes == (("slaves", "eth0 eth1"),)
    assert nics["eth1"].attributes == (("bond", "bond0"),)
    grow(tmp_path, {f"devices/{two}/net/eth1/carrier": "0"})
    nics = {nic.name: nic for nic in _probe(tmp_path).topology.nics}
    assert (nics["bond0"].state, nics["eth1"].state) == (State.DEGRADED, State.DOWN)
    assert "1 of its 2 interfaces cannot carry anything: eth1: no carrier" in nics["bond0"].reason
    grow(tmp_path, {"devices/virtual/net/bond0/carrier": "0"})
    assert _probe(tmp_path).topology.nics[0].state is State.DOWN


def test_a_bond_of_what_is_not_there(tmp_path: Path) -> None:
    files = {**interface("eth0"), **_bond("eth0", "../eth0", "eth7")}
    found = _probe(grow(tmp_path, files))
    assert found.topology.nics[0].state is State.UP
    (note,) = found.topology.notes
    assert note.endswith('bonding/slaves: left out "../eth0 eth7": no such interface')


def test_an_adapter_and_its_interface_of_one_name(tmp_path: Path) -> None:
    nic = _only(grow(tmp_path, {**interface("ibp26s0"), **port("ibp26s0")}))
    assert (nic.name, nic.device) == ("ibp26s0/ip", "ibp26s0")


def test_a_host_called_like_its_interface(tmp_path: Path) -> None:
    found = probe_net("eth0", 0.0, grow(tmp_path, interface("eth0")))
    assert [nic.name for nic in found.topology.nics] == ["eth0:eth0"]
