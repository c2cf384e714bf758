"""Calls that are made again with the same arrays: they are checked and bound once."""

import numpy as np

from pycomm.call import Array, Call

__all__ = ["Key", "Recent"]

#: The collective, the identities of the arrays, and all other arguments that count.
Key = tuple[object, ...]

# Remembered calls hold their arrays, so only short ones are, and not too many bytes of them.
_LONGEST, _MOST = 1 << 20, 16 << 20


class Recent:
    """The short calls that a communicator has made lately, by their arguments.

    They hold their arrays, so that no other array can have the same identity. What may change in an
    array meanwhile is checked: dtype, layout and whether it is writable. Its memory may not, since
    NumPy refuses to resize an array that others refer to.
    """

    def __init__(self) -> None:
        self._calls: dict[Key, tuple[Call, list[tuple[Array, object, bool]], int]] = {}
        self._nbytes = 0

    def get(self, key: Key) -> Call | None:
        """Return the call that was made with these arguments."""
        try:
            found = self._calls.get(key)
        except TypeError:  # not hashable: a wrong argument
            return None
        if found is None:
            return None
        call, arrays, nbytes = found
        for array, dtype, writable in arrays:
            flags = array.flags
            if (
                array.dtype is not dtype
                or not flags.c_contiguous
                or (writable and not flags.writeable)
            ):
                del self._calls[key]
                self._nbytes -= nbytes
                return None
        return call

    def put(self, key: Key, call: Call) -> None:
        """Remember a call, unless it is long or its arrays are not plain NumPy arrays."""
        if call.prepare is not None:
            return
        arrays = {}
        for buffer in (call.x, call.out, call.target):
            if buffer is not None:
                if type(buffer.owner) is not np.ndarray:
                    return
                arrays[id(buffer.owner)] = buffer.owner
        nbytes = sum(array.nbytes for array in arrays.values())
        if nbytes > _LONGEST:
            return
        if self._nbytes + nbytes > _MOST or len(self._calls) >= 1024:
            self.clear()
        self._nbytes += nbytes
        self._calls[key] = (
            call,
            [(array, array.dtype, array.flags.writeable) for array in arrays.values()],
            nbytes,
        )

    def clear(self) -> None:
        """Forget all of them."""
        self._calls.clear()
        self._nbytes = 0
