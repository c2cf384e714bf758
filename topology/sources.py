"""A topology from a file of any kind that is known, told apart by what is in it; pure."""

import json

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import Topology
from pycomm.topology.nccl_xml import read_xml
from pycomm.topology.smi import read_smi

__all__ = ["read_any"]

_WIDE = (b"\xff\xfe", b"\xfe\xff")


def read_any(data: bytes, *, source: str, host: str = "host0") -> Topology:
    """Return the topology in XML of NCCL, a matrix of `nvidia-smi topo -m`, or JSON of pycomm.

    Parameters
    ----------
    data : bytes
        What is in the file.
    source : str
        What to call it in errors and notes.
    host : str
        The name of the host, where the file does not say.

    Raises
    ------
    ArgumentValueError
        If it is nothing that is known; the message is one line.
    """
    # PowerShell writes what a tool prints as UTF-16.
    encoding = "utf-16" if data.startswith(_WIDE) else "utf-8-sig"
    text = data.decode(encoding, errors="replace")
    try:
        return _read(text, source, host)
    except ArgumentValueError as error:
        told = "".join(letter if letter.isprintable() else "?" for letter in str(error))
        raise ArgumentValueError(told if source in told else f"{source}: {told}") from None


def _read(text: str, source: str, host: str) -> Topology:
    start = text.lstrip()[:1]
    if not start:
        raise ArgumentValueError(f"{source}: it is empty")
    if start == "<":
        return read_xml(text, source=source, host=host)
    if start != "{":
        return read_smi(text, source=source, host=host)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentValueError(f"{source}: not JSON, or cut off: {error}") from None
    # What `pycomm topo --json` and `Snapshot.to_json` write holds the topology as a part.
    inner = data if "format" in data else data.get("topology")
    if not isinstance(inner, dict):
        raise ArgumentValueError(f"{source}: JSON, but no topology of pycomm")
    return Topology.from_json(json.dumps(inner))
