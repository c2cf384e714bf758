"""Reading /sys: what a file may hold instead of what belongs there, and who the host is."""

import errno
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sysfs import fail_reading, function, grow, interface, node, port

from pycomm.topology.graph import Topology
from pycomm.topology.probes import place as place_module
from pycomm.topology.probes import sysfs
from pycomm.topology.probes.infiniband import probe_infiniband
from pycomm.topology.probes.net import probe_net
from pycomm.topology.probes.pci import place, probe_pci, samples_of
from pycomm.topology.probes.place import identity

BOOT = "3f0e2a9c-0000-4000-8000-123456789abc"


def test_reading(tmp_path: Path) -> None:
    grow(tmp_path, {"text": " 4: ACTIVE ", "folder": None, "link": "-> nowhere"})
    assert sysfs.read(tmp_path / "text").text == "4: ACTIVE"
    assert sysfs.read(tmp_path / "text").reason == f'{tmp_path}/text says "4: ACTIVE"'
    assert sysfs.read(tmp_path / "link").reason == f"{tmp_path}/link does not exist"
    assert sysfs.read(tmp_path / "text" / "x").missing
    assert sysfs.read(tmp_path / "folder").error == "EISDIR (Is a directory)"
    assert sysfs.read(tmp_path / "a\0b").error == "embedded null byte"


def test_reading_neither_blocks_nor_ends_late(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert sysfs.read(tmp_path / "pipe").text == ""
    assert len(sysfs.read(Path("/dev/zero")).text or "") <= 1 << 16
    (tmp_path / "rubbish").write_bytes(b"\xff\x00\x1b[31m")
    assert sysfs.read(tmp_path / "rubbish").reason.isprintable()


def test_errors_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError("odd"), OSError(), OSError(9999, "odd"), BlockingIOError(11, "x")):

        def raw(path: Path, error: OSError = error) -> bytes:
            raise error

        monkeypatch.setattr(sysfs, "_raw", raw)
        reading = sysfs.read(tmp_path / "x")
        assert (reading.text, reading.missing, bool(reading.error)) == (None, False, True)


def test_folders(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"b\xff")).mkdir()
    grow(tmp_path, {"mlx5_10": None, "mlx5_9": "-> nowhere", "mlx5_bond_0": None, "file": ""})
    names, notes = sysfs.folders(tmp_path)
    assert names == ["mlx5_9", "mlx5_10", "mlx5_bond_0"]
    assert notes == [f"{tmp_path}: left out 'b\\udcff', which is no name"]
    assert sysfs.folders(tmp_path / "none") == ([], [])
    assert "ENOTDIR" in sysfs.folders(tmp_path / "file")[1][0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)), ("0, 2", (0, 2)), ("5,0", (0, 5)), ("", ()),
        (" \n", ()), (None, None), ("N/A", None), ("3-1", None), ("0-99999999", None), ("1,", None),
        ("-1", None), ("\u0663", None),
    ],
)  # fmt: skip
def test_lists_of_cpus(text: str | None, expected: tuple[int, ...] | None) -> None:
    assert sysfs.cpu_list(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12), ("-1", -1), ("0x1003", 0x1003), (" 7\n", 7), ("", None), (None, None),
        ("N/A (no PMA)", None), ("0-1", None), ("1e3", None), ("9" * 5000, None), ("\u0663", None),
    ],
)  # fmt: skip
def test_integers(text: str | None, expected: int | None) -> None:
    assert sysfs.integer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400 Gb/sec (4X NDR)", (50e9, 4)), ("2.5 Gb/sec (1X SDR)", (0.3125e9, 1)),
        ("200 Gb/sec (2X NDR)", (25e9, 2)), ("100 Gb/sec", (12.5e9, None)),
        ("0 Gb/sec (0X)", (None, None)), ("", (None, None)), ("fast", (None, None)),
        ("-4 Gb/sec", (None, None)), (None, (None, None)),
    ],
)  # fmt: skip
def test_rates_of_ports(text: str | None, expected: tuple[float | None, int | None]) -> None:
    assert sysfs.port_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16 GT/s", 16.0), ("16.0 GT/s PCIe", 16.0), ("2.5 GT/s", 2.5), ("", None),
        ("Unknown", None), ("Unknown speed", None), (None, None), ("0 GT/s", None), ("16", None),
    ],
)  # fmt: skip
def test_speeds_of_pci(text: str | None, expected: float | None) -> None:
    assert sysfs.pci_speed(text) == expected


def test_rates_of_pci() -> None:
    assert sysfs.pci_rate(2.5, 1) == 0.25e9
    assert sysfs.pci_rate(32.0, 16) == pytest.approx(63e9, rel=1e-3)
    assert sysfs.pci_rate(None, 16) is sysfs.pci_rate(16.0, None) is None


def test_bus_ids() -> None:
    assert sysfs.bus_key("00000000:1A:00.0") == "0000:1a:00.0" == sysfs.bus_key(" 1a:00.0\n")
    assert sysfs.bus_key("10000:01:00.0") == "10000:01:00.0"
    assert [sysfs.bus_key(text) for text in ("", "GPU0", "0000:1a:00", "0000:1a:00.9")] == [
        None
    ] * 4
    path = "../pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/net/eth0"
    assert sysfs.bus_id_in(path) == "0000:00:14.0"
    assert sysfs.bus_id_in("../../devices/virtual/net/lo") is None


def _identity_tree(root: Path, boot: str | None = BOOT, **spaces: str) -> Path:
    numbers = {"net": "1", "ipc": "2", "pid": "3", **spaces}
    grow(root, {f"proc/self/ns/{space}": f"-> {space}:[{n}]" for space, n in numbers.items()})
    return grow(root, {} if boot is None else {"proc/sys/kernel/random/boot_id": boot})


def test_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module.socket, "gethostname", lambda: "node")
    one = identity(_identity_tree(tmp_path / "a"))
    assert (one.name, one.reason) == ("node", "")
    assert identity(_identity_tree(tmp_path / "b", BOOT.upper())) == one
    for at, space in enumerate(("net", "ipc", "pid")):
        other = identity(_identity_tree(tmp_path / f"c{at}", **{space: "9"}))
        assert other.key != one.key  # a container
    assert identity(_identity_tree(tmp_path / "d", BOOT.replace("3", "4"))).key != one.key
    monkeypatch.setattr(place_module.socket, "gethostname", lambda: "localhost")
    assert identity(tmp_path / "a").key == one.key


@pytest.mark.parametrize("boot", [None, "", "rubbish", "00000000-0000-0000-0000-000000000000"])
def test_identity_by_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str | None
) -> None:
    _identity_tree(tmp_path, boot)
    monkeypatch.setattr(place_module.socket, "gethostname", lambda: "node1")
    one = identity(tmp_path)
    assert "boot_id" in one.reason
    assert one.reason.endswith("this host is told from others by its name only")
    monkeypatch.setattr(place_module.socket, "gethostname", lambda: "node2")
    assert identity(tmp_path).key != one.key


def test_identity_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise OSError(errno.EFAULT, "no name")

    monkeypatch.setattr(place_module.socket, "gethostname", fail)
    found = identity(tmp_path)
    assert (found.name, len(found.key)) == ("localhost", 32)
    assert "ns/net cannot be read: containers may not be told apart" in found.reason


def test_identity_of_this_host() -> None:
    assert identity() == identity()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree with something of everything."""
    counters = "class/infiniband/mlx5_0/ports/1/counters"
    bond = "class/net/bond0/bonding/slaves"
    root = grow(tmp_path_factory.mktemp("sys"), {**port("mlx5_0"), **port("mlx5_1")})
    grow(root, {**interface("eth0"), **node(0, "0-3"), **node(1, "4-7"), bond: "eth0"})
    grow(root, {"class/infiniband/mlx5_0/hca_type": "MT4129", f"{counters}/link_downed": "255"})
    grow(root, function("pci0000:17/0000:17:00.0/0000:18:00.0/0000:19:00.0", numa_node="1"))
    grow(root, {"devices/pci0000:17/0000:17:00.0/0000:18:00.0/0000:19:00.0/max_link_width": "16"})
    return root


_CONTENTS = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(str.encode),
    st.sampled_from([errno.EINVAL, errno.EIO, errno.EACCES, errno.ENOENT, errno.ENODEV]),
    st.sampled_from(
        [
            "4: ACTIVE",
            "5: LinkUp",
            "N/A (no PMA)",
            "-1",
            "0",
            "1",
            "eth0 eth1",
            "0-3,5",
            "16",
            "0x1",
            "25 Gb/sec (1X EDR)",
            "99999999999999999999999",
            "Unknown",
            "16.0 GT/s PCIe",
            "InfiniBand",
            "up",
            "nan Gb/sec",
        ]
    ).map(str.encode),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_CONTENTS, min_size=1, max_size=8), st.integers(0, 1 << 32), st.text(max_size=9))
def test_probes_never_raise(
    machine: Path, contents: list[bytes | int], seed: int, host: str
) -> None:
    def raw(path: Path) -> bytes:
        content = contents[(zlib.crc32(str(path).encode()) + seed) % len(contents)]
        if isinstance(content, int):
            raise OSError(content, "made up")
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysfs, "_raw", raw)
        for probe in (probe_infiniband, probe_net):
            found = probe(host, 1.0, machine)
            assert Topology.from_json(found.topology.to_json()) == found.topology
            assert all(sample.reason or sample.state == "up" for sample in found.samples)
            texts = (*found.topology.notes, *(sample.reason for sample in found.samples))
            assert all(map(str.isprintable, texts))
        tree = probe_pci(["0000:19:00.0", "0000:17:00.0", host], host, 1.0, machine)
        placed = place(probe_net(host, 1.0, machine).topology, tree)
        assert Topology.from_json(placed.to_json()) == placed
        samples_of(placed, tree)
        identity(machine)


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_parsers_never_raise(text: str) -> None:
    sysfs.integer(text)
    sysfs.cpu_list(text)
    sysfs.port_rate(text)
    sysfs.pci_speed(text)
    sysfs.bus_key(text)
    sysfs.bus_id_in(text)
    assert sysfs.quoted(text).isprintable()


def test_files_that_cannot_be_read_by_anyone(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reading(monkeypatch, {"": errno.EACCES})
    states = {s.state for s in probe_infiniband("h", 0.0, machine).samples}
    states |= {s.state for s in probe_net("h", 0.0, machine).samples}
    states |= {s.state for s in probe_pci(["0000:19:00.0"], "h", 0.0, machine).samples}
    assert states == {"unknown"}
