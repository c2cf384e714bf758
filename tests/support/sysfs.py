"""Trees like /sys, made of a few words: what a machine shows, and what it fails to."""

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from pycomm.topology.probes import sysfs

#: What a good port says.
PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "link_layer": "InfiniBand",
    "rate": "100 Gb/sec (4X EDR)",
    "lid": "0x12",
    "sm_lid": "0x1",
}


def grow(root: Path, files: Mapping[str, str | bytes | None]) -> Path:
    """Add files to a tree: text, ``-> target`` for a link, None for a folder; return the tree."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(content + "\n")
    return root


def port(hca: str, number: int = 1, **said: str | None) -> dict[str, str]:
    """Return the files of a good port, but for what is said otherwise; None leaves a file out."""
    folder = f"class/infiniband/{hca}/ports/{number}"
    files = {**PORT, **said}
    return {f"{folder}/{name}": text for name, text in files.items() if text is not None}


def interface(name: str, path: str = "pci0000:00/0000:00:03.0", **said: str) -> dict[str, str]:
    """Return the files of an adapter's interface that is up, but for what is said otherwise."""
    folder = f"devices/{path}/net/{name}"
    files = {"carrier": "1", "operstate": "up", "flags": "0x1003", "speed": "25000", **said}
    return {
        f"class/net/{name}": f"-> ../../{folder}",
        f"{folder}/device": "-> ../..",
        **{f"{folder}/{file}": text for file, text in files.items()},
    }


def function(path: str, **said: str) -> dict[str, str | None]:
    """Return the files of a PCI function at ``pci0000:17/0000:17:00.0/...``."""
    bus_id = path.split("/")[-1]
    return {
        f"devices/{path}": None,
        f"bus/pci/devices/{bus_id}": f"-> ../../../devices/{path}",
        **{f"devices/{path}/{name}": text for name, text in said.items()},
    }


def node(index: int, cpus: str) -> dict[str, str]:
    """Return the files of a NUMA node."""
    return {f"devices/system/node/node{index}/cpulist": cpus}


def fail_reading(monkeypatch: pytest.MonkeyPatch, failures: Mapping[str, int | bytes]) -> None:
    """Let files whose path ends so fail with an errno, or hold other bytes."""
    read = sysfs._raw

    def raw(path: Path) -> bytes:
        for end, failure in failures.items():
            if str(path).endswith(end):
                if isinstance(failure, bytes):
                    return failure
                raise OSError(failure, errno.errorcode[failure])
        return read(path)

    monkeypatch.setattr(sysfs, "_raw", raw)
