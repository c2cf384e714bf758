"""What was measured on a machine, in a small file: which algorithm is best where, and a cost model.

A file belongs to one kind of machine. It has an entry for each layout that was measured, the
numbers of ranks host by host. Rank 0 reads it, and all ranks get what it has read.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.algorithms.cost import Model
from pycomm.algorithms.registry import RESERVED, names
from pycomm.algorithms.select import EVERYTHING, Rule, Table
from pycomm.errors import ArgumentValueError

__all__ = [
    "VARIABLE",
    "Entry",
    "Tuning",
    "check_writable",
    "default_path",
    "find",
    "machine",
    "read",
    "write",
]

#: Names a file, or says ``off``.
VARIABLE = "PYCOMM_TUNING"

_FORMAT = "pycomm tuning"
_VERSION = 3  # grows when old tables say nothing about new code
_LARGEST = 1 << 20  # bytes of a file


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for one layout.

    Attributes
    ----------
    layout : tuple of int
        Ranks on each host, in the order of the hosts' first ranks.
    tables : dict
        For each kind of memory, the best algorithms by collective and size.
    model : Model
        What messages and reductions cost.
    bandwidths : tuple of float, optional
        Bytes a second that each rank reaches to other hosts, if ranks differ.
    """

    layout: tuple[int, ...]
    tables: Mapping[str, Table]
    model: Model
    bandwidths: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The entries of a file, and which file it is."""

    source: str
    entries: tuple[Entry, ...]

    def entry(self, layout: tuple[int, ...]) -> Entry | None:
        """Return the entry for a layout, None if it was not measured."""
        return next((entry for entry in self.entries if entry.layout == layout), None)


def machine(library: str) -> dict[str, Any]:
    """Return what a measurement holds for: processor, its cores, and the library underneath."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware"):
            cpu = value.strip()
            break
    return {"cpu": cpu, "cores": os.cpu_count(), "library": library}


def default_path(environ: Mapping[str, str]) -> Path | None:
    """Return where the file is if no variable says so, None where there is no home."""
    base = environ.get("XDG_CONFIG_HOME") or ""
    if not base and environ.get("HOME"):
        base = str(Path(environ["HOME"]) / ".config")
    return Path(base) / "pycomm" / "tuning.json" if Path(base).is_absolute() else None


def find(environ: Mapping[str, str], library: str) -> tuple[Tuning | None, str | None]:
    """Return the tuning to go by, and why a file that is there is not used.

    Raises
    ------
    ArgumentValueError
        If the file that the variable names cannot be used. One in the default place is optional.
    """
    named = environ.get(VARIABLE, "")
    if named.lower() == "off":
        return None, None
    path = Path(named) if named else default_path(environ)
    if path is None or not (named or path.exists()):
        return None, None
    try:
        return read(path, machine(library)), None
    except ArgumentValueError as error:
        if named:
            raise ArgumentValueError(f"{VARIABLE}: {error}") from None
        return None, str(error)


def read(path: Path, here: Mapping[str, Any]) -> Tuning:
    """Return what a file says about the machine `here`.

    Raises
    ------
    ArgumentValueError
        If there is no such file, it is no tuning, or a foreign or stale one; it says which.
    """
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
            raise ArgumentValueError(f"{path} is no tuning: it is no file of less than 1 MiB")
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentValueError(f"{path} cannot be read: {error.strerror}") from None
    except (RecursionError, ValueError) as error:
        raise ArgumentValueError(f"{path} is no tuning: {error}") from None
    if not isinstance(told, dict) or told.get("format") != _FORMAT:
        raise ArgumentValueError(f'{path} is no tuning: it lacks "format": "{_FORMAT}"')
    if told.get("version") != _VERSION:
        raise ArgumentValueError(
            f"{path} is stale: it has version {told.get('version')}, this pycomm writes "
            f"{_VERSION}; run `pycomm tune` again"
        )
    there = told.get("machine")
    if there != dict(here):
        known = there if isinstance(there, dict) else {}
        different = [
            f"{key} was {known.get(key)!r} and is {value!r}"
            for key, value in here.items()
            if known.get(key) != value
        ]
        raise ArgumentValueError(
            f"{path} is from another machine: {'; '.join(different) or 'it has more facts'}; run "
            "`pycomm tune` here"
        )
    try:
        entries = tuple(_entry(one) for one in told["entries"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArgumentValueError(f"{path} is no tuning: {error!r}") from None
    return Tuning(str(path), entries)


def _entry(told: Mapping[str, Any]) -> Entry:
    tables = {memory: _table(table) for memory, table in told["tables"].items()}
    layout = tuple(int(ranks) for ranks in told["layout"])
    speeds = told["bandwidths"]
    bandwidths = None if speeds is None else tuple(map(float, speeds))
    positive = bandwidths is None or all(0 < speed < float("inf") for speed in bandwidths)
    if not positive or (bandwidths is not None and len(bandwidths) != sum(layout)):
        raise ValueError(f"bandwidths are not one positive number for each of {sum(layout)} ranks")
    return Entry(layout, tables, Model.from_dict(told["model"]), bandwidths)


def _table(told: Mapping[str, Any]) -> Table:
    table = {}
    for collective, rules in told.items():
        known = (*RESERVED, *names(collective))
        made = [
            Rule(EVERYTHING if limit is None else int(limit), tuple(best)) for limit, best in rules
        ]
        limits = [rule.limit for rule in made]
        if not made or limits != sorted(limits) or limits[-1] != EVERYTHING:
            raise ValueError(f"the rules for {collective} do not cover all sizes in order")
        for rule in made:
            unknown = [name for name in rule.names if name not in known or name == "auto"]
            if unknown or not rule.names:
                raise ValueError(f"there is no algorithm {unknown} for {collective}")
        table[collective] = tuple(made)
    return table


def check_writable(path: Path) -> None:
    """Raise `ArgumentValueError` unless `write` can write there without loss.

    What is there must be a tuning, if also of another machine.
    """
    try:
        if path.is_dir() or (path.exists() and _FORMAT not in path.read_text(encoding="utf-8")):
            raise ArgumentValueError(f"{path} is no tuning, and is not overwritten")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ArgumentValueError(f"{path} cannot be written: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentValueError(f"{path} is no tuning, and is not overwritten") from None


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}")


def write(path: Path, entry: Entry, here: Mapping[str, Any]) -> None:
    """Write an entry to a file, beside those of other layouts if it is of the same machine.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    try:
        others = [one for one in read(path, here).entries if one.layout != entry.layout]
    except ArgumentValueError:
        others = []
    entries = [
        {
            "layout": one.layout,
            "model": one.model.to_dict(),
            "bandwidths": one.bandwidths,
            "tables": {
                memory: {
                    collective: [
                        [None if rule.limit == EVERYTHING else rule.limit, rule.names]
                        for rule in rules
                    ]
                    for collective, rules in table.items()
                }
                for memory, table in one.tables.items()
            },
        }
        for one in sorted([*others, entry], key=lambda one: one.layout)
    ]
    told = {"format": _FORMAT, "version": _VERSION, "machine": dict(here), "entries": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: another job may be reading it.
    partial = _partial(path)
    partial.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
