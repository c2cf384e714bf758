"""A C library as a table of prototypes: the text of its header is the only source of truth.

A table is written as C declarations, grouped by the version of the library that first had them.
A small reader turns each into the argument and result types of ctypes, so that nothing is said
twice and every row can be compared with the official header.

The functions are bare: they return the library's code and nobody looks at it. Attaching a check
would cost as much as the call itself, so each table has one method for that, called by whoever
makes the call.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pycomm.bindings._library import Library
from pycomm.errors import UnsupportedError

__all__ = ["Row", "Table", "read_rows"]

# What C itself and <stdint.h> call the types that occur; each library adds its own.
C_TYPES: Mapping[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
    # c_void_p takes a str, as wide characters; this one takes bytes only.
    "const char*": ctypes.c_char_p,
}

_TOKENS = re.compile(r"\w+|\*")
_DECLARATION = re.compile(r"\s*([\w\s*]*[\s*])(\w+)\s*\(([^()]*)\)\s*")


@dataclass(frozen=True)
class Row:
    """One function: its C types in one spelling, and the first version that has it."""

    since: str
    name: str
    result: str
    parameters: tuple[tuple[str, str], ...]  # (type, name)

    @property
    def prototype(self) -> str:
        """The declaration in C, without the semicolon."""
        inside = ", ".join(f"{kind} {name}" for kind, name in self.parameters) or "void"
        return f"{self.result} {self.name}({inside})"


def read_rows(blocks: Mapping[str, str]) -> Iterator[Row]:
    """Read C declarations, which end in semicolons, grouped by first version.

    Raises
    ------
    ValueError
        If a declaration cannot be read: every parameter must have a name.
    """
    for since, block in blocks.items():
        for text in block.split(";"):
            if not text.strip():
                continue
            match = _DECLARATION.fullmatch(text)
            if match is None:
                raise ValueError(f"not a declaration of a function: {text.strip()}")
            result, name, inside = match.groups()
            listed = [] if inside.strip() in ("", "void") else inside.split(",")
            yield Row(
                since, name, _spelled(_TOKENS.findall(result)), tuple(map(_parameter, listed))
            )


def _parameter(text: str) -> tuple[str, str]:
    *kind, name = _TOKENS.findall(text)
    if not kind or name == "*":
        raise ValueError(f"a parameter without a type or a name: {text.strip()}")
    return _spelled(kind), name


def _spelled(tokens: list[str]) -> str:
    return " ".join(tokens).replace(" *", "*")


def find_ctype(kind: str, types: Mapping[str, Any]) -> Any:
    """Return what stands for a C type in ctypes.

    A pointer is an address (`c_void_p`: takes ``byref``, pointers, arrays, whole integers, None),
    except that one to a structure takes that structure only.

    Raises
    ------
    ValueError
        If nobody knows the type.
    """
    for known in (types, C_TYPES):
        for name in (kind, kind.removeprefix("const ")):
            if name in known:
                return known[name]
    if not kind.endswith("*"):
        raise ValueError(f"unknown C type {kind}")
    target = types.get(kind[:-1].removeprefix("const "))
    if isinstance(target, type) and issubclass(target, ctypes.Structure):
        return ctypes.POINTER(target)
    return ctypes.c_void_p


class Table:
    """The functions of one library, as attributes; found and loaded on first use.

    An attribute is the bare ctypes function with its types set, kept in the instance, so that a
    later call costs what the call itself costs. The GIL is released during each.

    Parameters
    ----------
    blocks : Mapping of str to str
        C declarations by the version that first had them.
    types : Mapping of str to ctypes type
        The C types that are this library's own.
    load : callable
        Finds and loads it: what it is, and the handle.
    """

    provider: ClassVar[str] = "the library"  # in messages: whose newer version is asked for

    def __init__(
        self,
        blocks: Mapping[str, str],
        types: Mapping[str, Any],
        load: Callable[[], tuple[Library, ctypes.CDLL]],
    ) -> None:
        self._blocks = blocks
        self._types = types
        self._load = load
        self._lock = threading.Lock()
        self._loaded: tuple[Library, ctypes.CDLL] | None = None
        self._bare: dict[str, Any] = {}

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """Every function that is known, by name, whether this library has it or not."""
        return {row.name: row for row in read_rows(self._blocks)}

    @property
    def library(self) -> Library:
        """The library in use; finds and loads it.

        Raises
        ------
        LibraryNotFoundError
            If there is none.
        """
        return self._open()[0]

    @property
    def version(self) -> tuple[int, ...]:
        """The version of the library in use, as numbers."""
        return tuple(map(int, self.library.version.split(".")))

    def has(self, name: str) -> bool:
        """Return whether the library in use has a function."""
        return hasattr(self._open()[1], name)

    def bare(self, name: str) -> Any:
        """Return a function without argument types: for arguments that were prepared once.

        What ``c_void_p.from_param(number)`` returns is passed as it is, in half the time that it
        takes to convert a number; and nothing else may be passed, for nothing is checked.
        """
        function = self._bare.get(name)
        if function is None:
            function = self._bare[name] = self._open()[1][name]
        return function

    def signature(self, name: str) -> tuple[Any, list[Any]]:
        """Return the result type and the argument types of a function, in ctypes."""
        row = self.rows[name]
        arguments = [find_ctype(kind, self._types) for kind, _ in row.parameters]
        return find_ctype(row.result, self._types), arguments

    def reset(self) -> None:
        """Forget the library, so that the next use finds it anew; what is loaded stays loaded."""
        with self._lock:
            self._loaded = None
            self._bare.clear()
            for name in self.rows:
                self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        # Only for what the instance does not hold yet. Names of Python's own protocols come first:
        # they are asked for before there is an instance worth the name (copy, pickle).
        if name.startswith("_") or name not in self.rows:
            raise AttributeError(f"{type(self).__name__} has no function {name}")
        library, handle = self._open()
        try:
            function = handle[name]
        except AttributeError:
            raise UnsupportedError(
                f"{name} is not in {library.name} {library.version} ({library.path}):"
                f" {self.provider} {self.rows[name].since} is the first that has it"
            ) from None
        function.restype, function.argtypes = self.signature(name)
        self.__dict__[name] = function
        return function

    def _open(self) -> tuple[Library, ctypes.CDLL]:
        loaded = self._loaded
        if loaded is None:
            with self._lock:
                if self._loaded is None:
                    self._loaded = self._load()
                loaded = self._loaded
        return loaded
