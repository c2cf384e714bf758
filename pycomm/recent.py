"""Calls that are made again with the same arrays: they are checked and bound once."""

import numpy as np

from pycomm.buffers import address_of
from pycomm.call import Array, Call
from pycomm.transports.shared import REGIONS, available_memory

__all__ = ["Key", "Recent"]

#: The collective, the identities of the arrays, and all other arguments that count.
Key = tuple[object, ...]

# Only short calls are worth it. They hold their arrays, with all of what these are views of: bytes
# that are held, or this part of the memory that is available at first. A registered array holds a
# file descriptor, too.
_LONGEST, _MOST, _PART, _CALLS = 1 << 20, 16 << 20, 1 / 128, 256


class Recent:
    """The short calls that a communicator has made lately, by their arguments.

    They hold their arrays, so that no other array can have the same identity. What may change in an
    array meanwhile is checked: dtype, size, layout and whether it is writable.
    """

    def __init__(self) -> None:
        self._calls: dict[Key, tuple[Call, list[tuple[Array, object, int, bool]]]] = {}
        self._held: dict[int, int] = {}  # bytes of what is held, by identity
        self._most = max(_MOST, int((available_memory() or 0) * _PART))

    def get(self, key: Key) -> Call | None:
        """Return the call that was made with these arguments."""
        try:
            found = self._calls.get(key)
        except TypeError:  # not hashable: a wrong argument
            return None
        if found is None:
            return None
        call, arrays = found
        for array, dtype, size, writable in arrays:
            flags = array.flags
            if (
                array.dtype is not dtype
                or array.size != size
                or not flags.c_contiguous
                or (writable and not flags.writeable)
            ):
                del self._calls[key]
                return None
        return call

    def put(self, key: Key, call: Call) -> None:
        """Remember a call, unless it would hold much memory, or memory that is not NumPy's."""
        if call.prepare is not None:
            return
        arrays, held = {}, {}
        for buffer in (call.x, call.out, call.target):
            if buffer is not None:
                array = buffer.owner
                if type(array) is not np.ndarray or array.nbytes > _LONGEST:
                    return
                arrays[id(array)] = array
                owner = _owner(array)
                if owner is None:
                    return
                held[id(owner)] = owner.nbytes
        if sum(held.values()) > self._most:
            return
        if len(self._calls) >= _CALLS or sum((self._held | held).values()) > self._most:
            self.clear()
        self._held |= held
        self._calls[key] = (
            call,
            [(one, one.dtype, one.size, one.flags.writeable) for one in arrays.values()],
        )

    def clear(self) -> None:
        """Forget all of them."""
        self._calls.clear()
        self._held.clear()


def _owner(array: Array) -> Array | None:
    """Return the array whose memory this is, None if it is not NumPy's nor registered."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    # Others may want to close or resize what they own, and cannot while somebody has a view of it.
    ours = array.flags.owndata or REGIONS.find(address_of(array), array.nbytes) is not None
    return array if ours else None
