"""A look at a file before the loader gets it.

The loader maps a library by what its headers say. Where the file is shorter than that, as after an
interrupted copy, the process dies (SIGBUS) when it touches the missing part; no error, no words.
"""

import os
import struct
import sys
from pathlib import Path

__all__ = ["find_fault"]

_MAGIC = b"\x7fELF"
_SHARED, _LOAD = 3, 1  # ET_DYN, PT_LOAD
_HEADER = 64  # bytes of the file's header with 64 bits
_MACHINES = {
    3: "x86", 20: "ppc", 21: "ppc64", 22: "s390", 40: "arm", 62: "x86_64", 183: "aarch64",
    243: "riscv", 258: "loongarch",
}  # fmt: skip


def find_fault(path: str | os.PathLike[str]) -> str | None:
    """Return why a file cannot be a library of this process, None where nothing speaks against it.

    Raises nothing: a file that cannot be read is a fault too.
    """
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEADER)
            return _fault_of_header(head, size) or _fault_of_segments(file.fileno(), head, size)
    except OSError as error:
        return error.strerror or str(error)


def _order() -> str:
    return "<" if sys.byteorder == "little" else ">"


def _fault_of_header(head: bytes, size: int) -> str | None:
    if not size:
        return "an empty file"
    if not head.startswith(_MAGIC):
        # A linker script, a page of a web server, a pointer of Git LFS: show it.
        start = head[:24].decode("ascii", errors="replace").split("\n")[0]
        return f"not a library: no ELF header, it begins with {start!r}"
    if len(head) < _HEADER:
        return f"truncated: {size} bytes, file too short for its header"
    if head[4] != 2:
        return "a library with 32 bits"
    if head[5] != (1 if _order() == "<" else 2):
        return "a library of the other byte order"
    kind, machine = struct.unpack_from(_order() + "HH", head, 16)
    own = _own_machine()
    if own is not None and machine != own:
        named = [_MACHINES.get(number, f"machine {number}") for number in (machine, own)]
        return f"a library for {named[0]}, and this process is {named[1]}"
    if kind != _SHARED:
        return f"no shared library (ELF type {kind})"
    return None


def _own_machine() -> int | None:
    """Return the architecture of this process, which need not be that of the system."""
    try:
        with Path("/proc/self/exe").open("rb") as file:
            head = file.read(20)
    except OSError:
        return None
    if not head.startswith(_MAGIC) or len(head) < 20:
        return None
    (machine,) = struct.unpack_from(_order() + "H", head, 18)
    return int(machine)


def _fault_of_segments(fd: int, head: bytes, size: int) -> str | None:
    programs, sections = struct.unpack_from(_order() + "QQ", head, 32)
    each, count, section_each, section_count = struct.unpack_from(_order() + "HHHH", head, 54)
    end = max(programs + each * count, sections + section_each * section_count if sections else 0)
    if each < 56 or not count:
        return "no shared library: nothing in it is to be mapped"
    if end > size:
        return f"truncated: {size} bytes of at least {end}"
    table = os.pread(fd, each * count, programs)
    for at in range(0, len(table), each):
        kind, _, offset, _, _, length = struct.unpack_from(_order() + "IIQQQQ", table, at)
        if kind == _LOAD:
            end = max(end, offset + length)
    return f"truncated: {size} bytes of at least {end}" if end > size else None
