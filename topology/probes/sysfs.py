"""How probes read /sys: what cannot be read is a reason, never an exception.

A file may be missing, fail with EINVAL while an interface is down, say "N/A (no PMA)", or hold what
nobody expects. So each read returns text or a sentence that names the file and the error, and each
parser returns None for what is not of its kind.
"""

import errno
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Reading",
    "bus_id_in",
    "bus_key",
    "cpu_list",
    "folders",
    "free_name",
    "integer",
    "is_folder",
    "link_target",
    "pci_rate",
    "pci_speed",
    "port_rate",
    "quoted",
    "read",
    "read_counters",
    "resolved",
]

#: No file that a probe reads is longer; a link to /dev/zero would be.
_MOST_BYTES = 1 << 16
_MOST_CPUS = 1 << 16
_INTEGER = re.compile(r"[+-]?\d{1,20}|0[xX][0-9a-fA-F]{1,16}", re.ASCII)
_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_PORT_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*Gb/sec(?:\s*\((\d{1,3})X\b)?", re.ASCII)
_PCI_SPEED = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)\s*GT/s\b", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of reading a file.

    Attributes
    ----------
    path : Path
        The file.
    text : str or None
        What it holds, without the space around it; None if it could not be read.
    error : str
        Why not, such as "EINVAL (Invalid argument)"; empty if it was read.
    missing : bool
        Whether there is no such file.
    """

    path: Path
    text: str | None
    error: str = ""
    missing: bool = False

    @property
    def reason(self) -> str:
        """Say what the file holds, or why that is not known."""
        if self.text is not None:
            return f"{self.path} says {quoted(self.text)}"
        if self.missing:
            return f"{self.path} does not exist"
        return f"{self.path} cannot be read: {self.error}"


def _raw(path: Path) -> bytes:
    """Return the bytes of a file. Not to block: a tree put together by hand may hold a pipe."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts = []
        left = _MOST_BYTES
        while left > 0 and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(file)


def read(path: Path) -> Reading:
    """Return what a file holds, or why that cannot be told."""
    try:
        text = _raw(path).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        return Reading(path, None, _said(error), missing)
    return Reading(path, text.strip(" \t\r\n\0"))


def _said(error: OSError | ValueError) -> str:
    """Return an error as its name and its text."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    return f"{errno.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"


def quoted(text: str) -> str:
    """Return what a file says as it may stand in a sentence: in quotes, printable and short."""
    return ascii(text if len(text) <= 60 else text[:57] + "...").replace("'", '"')


def folders(path: Path) -> tuple[list[str], list[str]]:
    """Return the folders and links in a folder, `mlx5_2` before `mlx5_10`, and notes.

    A folder that is not there is empty, without a note. Plain files are left out: /sys/class/net
    holds one.
    """
    try:
        with os.scandir(path) as entries:
            found = [entry.name for entry in entries if entry.is_symlink() or entry.is_dir()]
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        return [], [f"{path} cannot be read: {_said(error)}"]
    names = [name for name in found if name.isascii() and name.isprintable()]
    odd = sorted(set(found) - set(names))
    notes = [f"{path}: left out {name!a}, which is no name" for name in odd]
    return sorted(names, key=_natural), notes


def _natural(name: str) -> tuple[list[tuple[str, int]], str]:
    """Return a key that orders names by the numbers in them."""
    parts = re.split(r"(\d+)", name)
    pairs = zip(parts[::2], [*map(int, parts[1::2]), -1], strict=True)
    return list(pairs), name


def free_name(name: str, host: str) -> str:
    """Return the name of a device, with its host in front where the host is called the same."""
    return f"{host}:{name}" if name == host else name


def link_target(path: Path) -> str | None:
    """Return where a link leads, as it stands, or None if it is no link or cannot be read."""
    try:
        return os.fspath(path.readlink())
    except (OSError, ValueError):
        return None


def is_folder(path: Path) -> bool:
    """Return whether there is a folder, as far as can be told."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def resolved(path: Path) -> str:
    """Return a path without the links in it, as far as they can be followed."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return ""


def bus_key(text: str) -> str | None:
    """Return a PCI bus id in the spelling of /sys, or None if it is not one.

    NVML writes `00000000:1A:00.0` where /sys has `0000:1a:00.0`; other tools leave the domain out.
    """
    found = _BUS_ID.fullmatch(text.strip())
    if not found:
        return None
    domain = int(found[1] or "0", 16)
    return f"{domain:04x}:{found[2]}:{found[3]}.{found[4]}".lower()


def bus_id_in(path: str) -> str | None:
    """Return the last PCI function on a path into /sys/devices, or None if there is none."""
    found = [key for part in path.split("/") if part.count(":") == 2 and (key := bus_key(part))]
    return found[-1] if found else None


def integer(text: str | None) -> int | None:
    """Return a decimal number, or a hexadecimal one with 0x; None for anything else."""
    text = (text or "").strip()
    if not _INTEGER.fullmatch(text):
        return None
    return int(text, 16 if text[:2] in ("0x", "0X") else 10)


def cpu_list(text: str | None) -> tuple[int, ...] | None:
    """Return the CPUs of a list such as `0-3,8,10-11`, none of an empty one, None of no list."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        if not ends:
            return None
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or last >= _MOST_CPUS:
            return None
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def port_rate(text: str | None) -> tuple[float | None, int | None]:
    """Return bytes per second and lanes of an InfiniBand rate such as `400 Gb/sec (4X NDR)`."""
    found = _PORT_RATE.match((text or "").strip())
    if not found:
        return None, None
    rate, lanes = float(found[1]) * 1e9 / 8, int(found[2] or 0)
    return rate or None, lanes or None


def pci_speed(text: str | None) -> float | None:
    """Return the GT/s of a PCI speed: `16 GT/s`, `16.0 GT/s PCIe`; None for `Unknown` or none."""
    found = _PCI_SPEED.match((text or "").strip())
    speed = float(found[1]) if found else 0.0
    return speed or None


def pci_rate(speed: float | None, lanes: int | None) -> float | None:
    """Return the bytes per second of a PCI link in one direction, after its line code."""
    if not speed or not lanes or not math.isfinite(speed):
        return None
    code = 8 / 10 if speed < 8 else 128 / 130 if speed < 64 else 242 / 256
    return speed * 1e9 * code * lanes / 8


def read_counters(
    places: Sequence[Path], names: Iterable[str], tops: Mapping[str, int] | None = None
) -> tuple[tuple[tuple[str, int], ...], list[str]]:
    """Return the counters that can be read, and notes on those that cannot.

    Parameters
    ----------
    places : sequence of Path
        The folders where to look, in turn.
    names : iterable of str
        The counters. One that is nowhere is left out without a note: drivers differ.
    tops : mapping of str to int, optional
        The values at which counters stick. One that stands there is passed on, with a note: it
        cannot grow any more.
    """
    found: list[tuple[str, int]] = []
    notes: list[str] = []
    left_out: dict[tuple[Path, str], list[str]] = {}
    for name in names:
        readings = (read(place / name) for place in places)
        reading = next((reading for reading in readings if not reading.missing), None)
        if reading is None:
            continue
        value = integer(reading.text)
        if value is None or not 0 <= value < 1 << 64:
            why = reading.error or f"says {quoted(reading.text or '')}"
            left_out.setdefault((reading.path.parent, why), []).append(name)
            continue
        found.append((name, value))
        if tops and value == tops.get(name):
            notes.append(f"{reading.path.parent}: {name} stands at {value}, where it sticks")
    for (place, why), absent in left_out.items():
        notes.append(f"{place}: left out {', '.join(absent)}: {why}")
    return tuple(found), notes
