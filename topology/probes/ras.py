"""NCCL's RAS: what the NCCL processes of a job know of each other, asked of one on this host.

Every process that uses NCCL 2.24 or newer answers on a port of its host, 28028 unless
``NCCL_RAS_ADDR`` says otherwise; in JSON since 2.28.7. The answer covers all processes of the job.
A rank that does not answer NCCL is missing in its communicator; one that answers may hang all the
same, in a kernel for instance. NCCL itself waits for silent ranks before it answers.

Asking is not free of risk: NCCL before 2.29.2 has faults in RAS by which the process that is asked
may crash, while it initialises or when ranks are missing. So ask about a job that hangs, and do not
ask all the time.
"""

import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pycomm.deadline import Deadline

__all__ = ["RasCommunicator", "RasRank", "RasStatus", "ras_lines", "ras_status", "read_ras"]

_HANDSHAKE = b"SERVER PROTOCOL"
_PROTOCOL = 2
#: An answer is some 500 bytes a rank and communicator.
_MOST_BYTES = 64 << 20
_MOST_LINE = 4096
_MISSING = re.compile(r'"missing_ranks"\s*:\s*\[[^\]]*\]')
_NO_COMMA = re.compile(r'("nvml_dev"\s*:\s*-?\d+)(\s+"status"\s*:)')

_Kind = TypeVar("_Kind", int, str, bool)


@dataclass(frozen=True, slots=True)
class RasRank:
    """One rank of a communicator; what the answer leaves out is None.

    Attributes
    ----------
    device : int or None
        Its number in NVML.
    missing : bool
        NCCL has nothing of this rank.
    unresponsive : bool
        Its process did not answer.
    dead : bool
        NCCL has given its process up.
    error : int
        The asynchronous error of its communicator there, a code of NCCL; 0 for none.
    aborted : bool
        Its communicator has been aborted there.
    operations : tuple of (str, int)
        How many collectives of each kind it has begun.
    """

    rank: int | None
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    missing: bool = False
    unresponsive: bool = False
    dead: bool = False
    error: int = 0
    aborted: bool = False
    operations: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    """One communicator of the job."""

    name: str
    size: int | None
    ranks: tuple[RasRank, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks NCCL has nothing of, ascending."""
        return tuple(sorted(r.rank for r in self.ranks if r.missing and r.rank is not None))

    @property
    def unresponsive(self) -> tuple[int, ...]:
        """The ranks whose processes did not answer or are given up, ascending."""
        silent = (r for r in self.ranks if r.unresponsive or r.dead)
        return tuple(sorted(r.rank for r in silent if r.rank is not None))


@dataclass(frozen=True, slots=True)
class RasStatus:
    """What NCCL answers; `reason` says why there is no answer, and is empty if there is one.

    Attributes
    ----------
    version : str or None
        The version of NCCL.
    timeouts : int or None
        For how many processes NCCL waited in vain.
    notes : tuple of str
        What was odd about the answer.
    """

    version: str | None = None
    communicators: tuple[RasCommunicator, ...] = ()
    timeouts: int | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def known(self) -> bool:
        """Whether there is an answer."""
        return not self.reason


class _NoAnswer(Exception):
    """There is none, for the reason in its text."""


def ras_status(address: tuple[str, int] = ("127.0.0.1", 28028), timeout: float = 1.0) -> RasStatus:
    """Return what NCCL knows of the job on this host, or a status with the reason it cannot be had.

    Never raises, and returns within `timeout`.

    Parameters
    ----------
    address : tuple of (str, int)
        Where NCCL listens; a number, since finding the address of a name has no deadline. The
        processes of a host share the port, and any of them may answer.
    timeout : float
        Seconds for all of it. NCCL is told to wait half as long for silent ranks, which versions
        with whole seconds only refuse: these wait five seconds and more.
    """
    try:
        text, notes = _asked(address, Deadline(timeout))
    except _NoAnswer as error:
        return RasStatus(reason=str(error))
    except Exception as error:
        return RasStatus(reason=f"asking NCCL failed: {type(error).__name__}: {error}")
    return read_ras(text, notes)


def _asked(address: tuple[str, int], deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Return the answer of whoever listens, and notes."""
    where = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=deadline.left) as connection:
            return _conversed(_Line(connection, deadline, where))
    except TimeoutError:
        raise _NoAnswer(f"no connection to {where} within {deadline.timeout:g} s") from None
    except OSError as error:
        raise _NoAnswer(f"no answer from {where}: {error.strerror or error}") from None


def _conversed(line: "_Line") -> tuple[str, tuple[str, ...]]:
    """Lead the conversation: who is there, how long to wait, in which form, and the question."""
    notes = []
    hello = line.ask(f"CLIENT PROTOCOL {_PROTOCOL}")
    if not hello.upper().startswith(_HANDSHAKE):
        raise _NoAnswer(f"what listens at {line.where} is not NCCL: it says {_shown(hello)}")
    if hello[len(_HANDSHAKE) :].strip() != str(_PROTOCOL).encode():
        notes.append(f"NCCL speaks another version of the protocol: {_shown(hello)}")
    patience = line.deadline.timeout / 2
    if line.ask(f"TIMEOUT {patience:g}").upper() != b"OK":
        notes.append(f"NCCL cannot wait {patience:g} s and waits as long as it likes")
    answer = line.ask("SET FORMAT json")
    if answer.upper() != b"OK":
        raise _NoAnswer(f"NCCL does not speak JSON, which it does since 2.28.7: {_shown(answer)}")
    line.send("VERBOSE STATUS")
    return line.rest().decode(errors="replace"), tuple(notes)


def _shown(answer: bytes) -> str:
    """Return the beginning of an answer, fit to be read."""
    return repr(answer[:60].decode(errors="replace"))


class _Line:
    """A connection on which lines go out and come in, all of it under one deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline, where: str) -> None:
        self.connection = connection
        self.deadline = deadline
        self.where = where
        self._kept = b""

    def send(self, text: str) -> None:
        """Send a line."""
        self._in_time(lambda: self.connection.sendall(f"{text}\n".encode()))

    def ask(self, text: str) -> bytes:
        """Send a line and return the one that answers it."""
        self.send(text)
        while b"\n" not in self._kept:
            if len(self._kept) > _MOST_LINE:
                raise _NoAnswer(f"{self.where} answers {text!r} without end")
            part = self._in_time(lambda: self.connection.recv(_MOST_LINE))
            if not part:
                raise _NoAnswer(f"{self.where} closed the connection at {text!r}")
            self._kept += part
        answer, _, self._kept = self._kept.partition(b"\n")
        return answer.strip()

    def rest(self) -> bytes:
        """Return all that comes until the other side closes."""
        parts = [self._kept]
        total = len(self._kept)
        while part := self._in_time(lambda: self.connection.recv(1 << 16)):
            parts.append(part)
            total += len(part)
            if total > _MOST_BYTES:
                raise _NoAnswer(f"the answer of {self.where} is longer than {_MOST_BYTES} bytes")
        return b"".join(parts)

    def _in_time(self, step: Callable[[], Any]) -> Any:
        """Return what a step returns, or give up at the deadline."""
        left = self.deadline.left
        if left > 0:
            self.connection.settimeout(left)
            try:
                return step()
            except TimeoutError:
                pass
            except ConnectionError:
                raise _NoAnswer(f"{self.where} closed the connection") from None
        raise _NoAnswer(
            f"{self.where} did not answer within {self.deadline.timeout:g} s; NCCL waits for "
            "silent ranks itself, so a longer timeout may help"
        )


def read_ras(text: str, notes: tuple[str, ...] = ()) -> RasStatus:
    """Return the status in an answer of NCCL, with a reason if it is malformed.

    NCCL 2.28.9 leaves out a comma in each missing rank; that alone is repaired, and noted.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        try:
            data = json.loads(_MISSING.sub(_with_commas, text))
        except (ValueError, RecursionError):
            return RasStatus(notes=notes, reason=f"the answer of NCCL is malformed: {error}")
        notes += ("the commas that NCCL 2.28.9 leaves out in missing_ranks were put in",)
    if not isinstance(data, dict) or not isinstance(data.get("communicators"), list):
        return RasStatus(notes=notes, reason="the answer of NCCL has no list of communicators")
    found = [entry for entry in data["communicators"] if isinstance(entry, dict)]
    if len(found) < len(data["communicators"]):
        notes += ("some communicators in the answer of NCCL are not records",)
    counted = _of(data, "communicators_count", int)
    if counted is not None and counted != len(found):
        notes += (f"NCCL counts {counted} communicators and lists {len(found)}",)
    ras = data.get("ras")
    return RasStatus(
        _of(data, "nccl_version", str),
        tuple(map(_communicator, found)),
        _of(ras, "timeouts_count", int) if isinstance(ras, dict) else None,
        notes,
    )


def _with_commas(found: re.Match[str]) -> str:
    """Return a list of missing ranks with the commas that belong there."""
    return _NO_COMMA.sub(r"\1,\2", found[0])


def _of(data: dict[str, Any], key: str, kind: type[_Kind]) -> _Kind | None:
    """Return a value if it is there and of the right kind."""
    value = data.get(key)
    return value if type(value) is kind else None


def _communicator(data: dict[str, Any]) -> RasCommunicator:
    """Return one communicator."""
    parts = [_of(data, key, str) for key in ("hash", "secondary_hash")]
    return RasCommunicator(
        ":".join(filter(None, parts)) or "?",
        _of(data, "size", int),
        (*_ranks(data.get("ranks"), False), *_ranks(data.get("missing_ranks"), True)),
    )


def _ranks(entries: object, missing: bool) -> list[RasRank]:
    """Return the ranks of a list, if it is one."""
    found = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        status = entry.get("status")
        # Some versions have these beside the status, not in it.
        status = {**entry, **(status if isinstance(status, dict) else {})}
        counts = entry.get("collective_counts")
        counts = counts if isinstance(counts, dict) else {}
        found.append(
            RasRank(
                _of(entry, "rank", int),
                _of(entry, "host", str),
                _of(entry, "pid", int),
                _of(entry, "nvml_dev", int),
                missing,
                bool(_of(status, "unresponsive", bool)),
                bool(_of(status, "considered_dead", bool)),
                _of(status, "async_error", int) or 0,
                bool(_of(status, "abort_flag", bool)),
                tuple((name, n) for name, n in counts.items() if type(n) is int),
            )
        )
    return found


def ras_lines(status: RasStatus | None) -> list[str]:
    """Return what NCCL says as a section of text; nothing if it was not asked."""
    if status is None:
        return []
    lines = ["NCCL RAS"]
    if not status.known:
        return [*lines, f"  unknown: {status.reason}", *(f"  note: {one}" for one in status.notes)]
    lines.append(f"  NCCL {status.version or 'of unknown version'}")
    for one in status.communicators:
        errors = [rank.rank for rank in one.ranks if rank.error or rank.aborted]
        faults = {"missing": one.missing, "silent": one.unresponsive, "with errors": errors}
        told = [f"ranks {', '.join(map(str, who))} {what}" for what, who in faults.items() if who]
        size = "?" if one.size is None else one.size
        lines.append(f"  communicator {one.name}, {size} ranks: {'; '.join(told) or 'all answer'}")
    if status.timeouts:
        lines.append(f"  {status.timeouts} processes did not answer NCCL in time")
    return [*lines, *(f"  note: {note}" for note in status.notes)]
