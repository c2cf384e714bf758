"""InfiniBand ports from /sys: what makes one usable, and what is left when files are not there."""

import errno
from pathlib import Path

import pytest
from support.sysfs import fail_reading, grow, port

from pycomm.topology.graph import LinkKind, Nic, State, Topology
from pycomm.topology.probes.infiniband import probe_infiniband
from pycomm.topology.samples import Findings, Sample


def _probe(root: Path) -> Findings:
    found = probe_infiniband("h", 7.0, root)
    assert Topology.from_json(found.topology.to_json()) == found.topology
    names = [nic.name for nic in found.topology.nics if not nic.virtual]
    assert [sample.subject for sample in found.samples] == names
    return found


def _only(root: Path) -> tuple[Nic, Sample]:
    found = _probe(root)
    (nic,) = found.topology.nics
    (sample,) = found.samples
    assert (sample.probe, sample.at) == ("infiniband", 7.0)
    assert (sample.state, sample.reason) == (nic.state, nic.reason)
    return nic, sample


def test_no_folder_is_no_adapter(tmp_path: Path) -> None:
    found = _probe(tmp_path)
    assert [host.name for host in found.topology.hosts] == ["h"]
    assert (found.topology.nics, found.topology.notes, found.samples) == ((), (), ())


def test_a_file_where_the_folder_belongs(tmp_path: Path) -> None:
    found = _probe(grow(tmp_path, {"class/infiniband": "x"}))
    assert found.topology.nics == ()
    assert "class/infiniband cannot be read: ENOTDIR" in found.topology.notes[0]


def test_a_good_port(tmp_path: Path) -> None:
    nic, sample = _only(grow(tmp_path, port("mlx5_0", link_layer="InfiniBand ")))
    assert (nic.name, nic.device, nic.fabric, nic.state) == ("mlx5_0", "mlx5_0", LinkKind.IB, "up")
    assert nic.bandwidth == sample.rate == 12.5e9
    assert (nic.reason, sample.counters) == ("", ())


def test_roce_needs_no_subnet_manager(tmp_path: Path) -> None:
    nic, _ = _only(grow(tmp_path, port("mlx5_bond_0", link_layer="Ethernet", sm_lid="0x0")))
    assert (nic.fabric, nic.state) == (LinkKind.ROCE, State.UP)


def test_an_unknown_link_layer(tmp_path: Path) -> None:
    nic, _ = _only(grow(tmp_path, port("rdmap79s0", link_layer="Unspecified")))
    assert (nic.fabric, nic.state) == (None, State.UP)


@pytest.mark.parametrize(
    ("state", "physical", "expected", "reason"),
    [
        ("1: DOWN", "2: Polling", State.DOWN, "looks for a peer"),
        ("1: DOWN", "3: Disabled", State.DOWN, "disabled"),
        ("1: DOWN", "4: PortConfigurationTraining", State.DOWN, "trained"),
        ("1: DOWN", "5: LinkUp", State.DOWN, 'state says "1: DOWN", phys_state "5: LinkUp"'),
        ("2: INIT", "5: LinkUp", State.DOWN, "no subnet manager has set up the port yet"),
        ("3: ARMED", "5: LinkUp", State.DOWN, "no subnet manager has set up the port yet"),
        ("4: ACTIVE", "6: LinkErrorRecovery", State.DOWN, "recovering"),
        ("5: ACTIVE_DEFER", "5: LinkUp", State.DOWN, "ACTIVE_DEFER"),
        ("4: ACTIVE", "4: ACTIVE", State.UNKNOWN, "which is not a physical state"),
        ("4: DOWN", "5: LinkUp", State.UNKNOWN, 'state says "4: DOWN", which tells nothing'),
        ("0: NOP", "5: LinkUp", State.UNKNOWN, "tells nothing"),
        ("", "5: LinkUp", State.UNKNOWN, "tells nothing"),
        ("N/A", "5: LinkUp", State.UNKNOWN, "tells nothing"),
        ("4: active", "5 : LINK_UP", State.UP, ""),
        ("ACTIVE", "5", State.UP, ""),
        (None, "5: LinkUp", State.UNKNOWN, "ports/1/state does not exist"),
        ("4: ACTIVE", None, State.UNKNOWN, "ports/1/phys_state does not exist"),
        ("1: DOWN", None, State.DOWN, 'says "1: DOWN"'),
    ],
)
def test_states(
    tmp_path: Path, state: str | None, physical: str | None, expected: State, reason: str
) -> None:
    nic, _ = _only(grow(tmp_path, port("mlx5_0", state=state, phys_state=physical)))
    assert nic.state is expected
    assert reason in nic.reason
    assert bool(nic.reason) == bool(reason)


def test_old_lids_and_a_rate_are_no_sign_of_life(tmp_path: Path) -> None:
    files = port(
        "mlx5_10", state="1: DOWN", phys_state="2: Polling", rate="10 Gb/sec (4X SDR)", lid="0x364"
    )
    nic, sample = _only(grow(tmp_path, files))
    assert (nic.state, nic.bandwidth, sample.rate) == (State.DOWN, None, None)


def test_no_subnet_manager_was_seen(tmp_path: Path) -> None:
    nic, _ = _only(grow(tmp_path, port("mlx4_0", state="2: INIT", sm_lid="0x0")))
    assert nic.reason.endswith("no subnet manager has set up the port yet (sm_lid is 0)")


def test_ethernet_is_not_set_up_by_a_subnet_manager(tmp_path: Path) -> None:
    nic, _ = _only(grow(tmp_path, port("mlx5_0", state="2: INIT", link_layer="Ethernet")))
    assert (nic.state, "subnet" in nic.reason) == (State.DOWN, False)
    grow(tmp_path, {"class/infiniband/mlx5_0/ports/1/phys_state": "3: Disabled"})
    assert "cable and peer" in _only(tmp_path)[0].reason


def test_two_ports_and_gaps_in_natural_order(tmp_path: Path) -> None:
    files = {**port("mlx4_0", 1), **port("mlx4_0", 2), **port("mlx5_10"), **port("mlx5_9")}
    found = _probe(grow(tmp_path, files))
    assert [(nic.name, nic.device) for nic in found.topology.nics] == [
        ("mlx4_0/1", "mlx4_0"),
        ("mlx4_0/2", "mlx4_0"),
        ("mlx5_9", "mlx5_9"),
        ("mlx5_10", "mlx5_10"),
    ]


def test_the_place_is_in_the_link(tmp_path: Path) -> None:
    function = "devices/pci0000:17/0000:17:00.0/0000:1a:00.3"
    grow(tmp_path, {
        **{name.replace("class", function): text for name, text in port("irdma1").items()},
        "class/infiniband/irdma1": f"-> ../../{function}/infiniband/irdma1",
        "class/infiniband/gone0": "-> ../../devices/pci0000:3a/0000:3a:00.0/infiniband/gone0",
        "class/infiniband/old0/device": "-> ../../../0000:0b:00.0",
        "class/infiniband/rxe0": "-> ../../devices/virtual/infiniband/rxe0",
        "class/infiniband/abi_version": "1",
    })  # fmt: skip
    nics = {nic.name: nic for nic in _probe(tmp_path).topology.nics}
    assert {name: nic.bus_id for name, nic in nics.items()} == {
        "irdma1": "0000:1a:00.3",
        "gone0": "0000:3a:00.0",
        "old0": "0000:0b:00.0",
        "rxe0": None,
    }
    assert [name for name, nic in nics.items() if nic.virtual] == ["rxe0"]
    assert (nics["irdma1"].state, nics["gone0"].state) == (State.UP, State.UNKNOWN)
    assert "gone0/ports shows no port" in nics["gone0"].reason
    assert nics["irdma1"].attributes == ()


def test_one_bad_adapter_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path, {**port("mlx5_0"), **port("mlx5_1"), "class/infiniband/mlx5_2/ports": "x"})
    failures = {"mlx5_0/ports/1/state": errno.EIO, "mlx5_0/hca_type": errno.EACCES}
    fail_reading(monkeypatch, failures)
    nics = _probe(tmp_path).topology.nics
    assert [nic.state for nic in nics] == [State.UNKNOWN, State.UP, State.UNKNOWN]
    assert nics[0].reason.endswith("mlx5_0/ports/1/state cannot be read: EIO (Input/output error)")
    assert "mlx5_2/ports cannot be read: ENOTDIR" in nics[2].reason


def test_fewer_lanes_than_others_of_the_type(tmp_path: Path) -> None:
    narrow = {"rate": "25 Gb/sec (1X EDR)"}
    slow = {"rate": "56 Gb/sec (4X FDR)"}
    grow(tmp_path, {
        **port("mlx5_0"), **port("mlx5_1", **narrow), **port("mlx5_2", **slow),
        **port("mlx5_3", state="2: INIT", **narrow),
        **port("mlx5_4", link_layer="Ethernet", **narrow),
        **port("mlx5_5", **narrow), **port("other0", **narrow),
        **{f"class/infiniband/mlx5_{n}/hca_type": "MT4119" for n in range(6)},
        **{f"class/infiniband/mlx5_{n}/board_id": "B" for n in range(5)},
    })  # fmt: skip
    found = _probe(tmp_path)
    states = {nic.name: str(nic.state) for nic in found.topology.nics}
    assert states == {
        "mlx5_0": "up",
        "mlx5_1": "degraded",
        "mlx5_2": "up",  # slower, with all its lanes: a matter of its peer
        "mlx5_3": "down",
        "mlx5_4": "up",  # 25 gigabit Ethernet
        "mlx5_5": "up",  # another board, which may have fewer
        "other0": "up",
    }
    assert found.samples[1].reason.startswith("runs at 1X where mlx5_0, also MT4119, runs at 4X")


def test_counters_that_mean_errors(tmp_path: Path) -> None:
    folder = "class/infiniband/mlx5_0/ports/1"
    grow(tmp_path, {
        **port("mlx5_0"),
        f"{folder}/counters/symbol_error": "3",
        f"{folder}/counters/VL15_dropped": "9",
        f"{folder}/counters/port_xmit_wait": "9",
        f"{folder}/counters_ext/port_rcv_errors": "14",
        f"{folder}/hw_counters/packet_seq_err": "1",
        f"{folder}/hw_counters/lifespan": "12",
        f"{folder}/hw_counters/out_of_sequence": "12",
    })  # fmt: skip
    found = _probe(tmp_path)
    assert found.samples[0].counters == (
        ("symbol_error", 3), ("port_rcv_errors", 14), ("packet_seq_err", 1),
    )  # fmt: skip
    assert found.topology.notes == ()


def test_counters_that_cannot_be_read_are_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    names = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")
    grow(tmp_path, port("mlx5_0"))
    grow(counters, {**dict.fromkeys(names, "0"), "port_rcv_remote_physical_errors": "-1"})
    grow(counters, {"local_link_integrity_errors": None})
    failures = {
        "/symbol_error": errno.EINVAL,
        "/link_downed": errno.EINVAL,
        "/link_error_recovery": b"N/A (no PMA)\n",
    }
    fail_reading(monkeypatch, failures)
    found = _probe(tmp_path)
    assert found.samples[0].state is State.UP
    assert found.samples[0].counters == (("port_rcv_errors", 0),)
    assert found.topology.notes == (
        f"{counters}: left out symbol_error, link_downed: EINVAL (Invalid argument)",
        f'{counters}: left out link_error_recovery: says "N/A (no PMA)"',
        f'{counters}: left out port_rcv_remote_physical_errors: says "-1"',
        f"{counters}: left out local_link_integrity_errors: EISDIR (Is a directory)",
    )


def test_counters_that_stick(tmp_path: Path) -> None:
    counters = "class/infiniband/mlx5_0/ports/1/counters"
    tops = {"link_downed": "255", "excessive_buffer_overrun_errors": "15", "symbol_error": "65535"}
    files = {f"{counters}/{name}": value for name, value in tops.items()}
    grow(tmp_path, {**port("mlx5_0"), **files, f"{counters}/port_rcv_errors": "255"})
    found = _probe(tmp_path)
    assert dict(found.samples[0].counters) == {
        "symbol_error": 65535,
        "link_downed": 255,
        "port_rcv_errors": 255,
        "excessive_buffer_overrun_errors": 15,
    }
    assert [note.split(": ")[1] for note in found.topology.notes] == [
        "symbol_error stands at 65535, where it sticks",
        "link_downed stands at 255, where it sticks",
        "excessive_buffer_overrun_errors stands at 15, where it sticks",
    ]


def test_a_host_called_like_its_adapter(tmp_path: Path) -> None:
    found = probe_infiniband("mlx5_0", 0.0, grow(tmp_path, port("mlx5_0")))
    assert [(nic.name, nic.device) for nic in found.topology.nics] == [("mlx5_0:mlx5_0", "mlx5_0")]


def test_32_adapters(tmp_path: Path) -> None:
    grow(tmp_path, {k: v for n in range(32) for k, v in port(f"rdmap{n}s0").items()})
    assert len(_probe(tmp_path).samples) == 32
