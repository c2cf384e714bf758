"""Error feedback: what rounding takes away is kept, and added before the next rounding."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from pycomm.algorithms.compression.cast import Cast
from pycomm.algorithms.compression.codec import (
    Array,
    Codec,
    as_codec,
    checked,
    from_dict,
    name_of,
    readers,
)
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.kernels.casts import clamp
from pycomm.kernels.host import quietly

__all__ = ["ErrorFeedback", "Key", "check_key"]

_log = logging.getLogger("pycomm")

#: What the caller calls the values of a call, from call to call.
Key = str | int

#: What a residual belongs to; with another one it starts anew.
Layout = tuple[Hashable, ...]


class ErrorFeedback:
    """A codec that remembers: encodes ``values + residual``, and keeps the new rounding error.

    So errors do not add up: over any number of steps the sum of what was decoded is the sum of what
    should have been sent, to within the last residual (Seide et al., 2014; Karimireddy et al.,
    2019). One object serves one rank, with any number of keys.

    Parameters
    ----------
    inner : Codec or str
        What encodes, for instance ``Cast("bf16")`` or ``"fp8_e4m3"``; without a state of its own.

    Attributes
    ----------
    inner : Codec
        The same.
    saturated, dropped : int
        How many values were too large for the format so far, and how many errors were not finite
        (of NaN, infinity or overflow) and were not kept.
    """

    def __init__(self, inner: Codec | str) -> None:
        codec = as_codec(inner)
        if codec is None or isinstance(codec, ErrorFeedback):
            raise ArgumentTypeError(
                f"error feedback wraps a codec that has none itself, not {inner!r}"
            )
        self.inner = codec
        self.saturated = 0
        self.dropped = 0
        self._kept: dict[Key, tuple[Layout, tuple[Any, ...]]] = {}

    def encoded_size(self, count: int) -> int:
        """Return the bytes that `count` values take."""
        return self.inner.encoded_size(count)

    def encode(self, source: Array, target: Array, key: Any = None) -> int:
        """Encode ``source`` plus the residual of `key`; see `Codec.encode`."""
        checked(self, source, target)
        (residual,) = self.residuals(key, ("encode", source.size), (source.size,))
        return self.compensate(source, target, residual)

    def compensate(self, source: Array, target: Array, residual: Array) -> int:
        """Encode ``source + residual``, and leave in `residual` what the encoding took away."""
        saturated: int
        if type(self.inner) is Cast:  # a subclass may encode in another way
            saturated, dropped = self.inner.compensate(source, target, residual)
        else:
            saturated, dropped = quietly(self._in_parts, source, target, residual)
        self.saturated += saturated
        self.dropped += dropped
        return saturated

    def _in_parts(self, source: Array, target: Array, residual: Array) -> tuple[int, int]:
        """Do `compensate` with a codec that knows nothing of residuals."""
        np.add(source, residual, out=residual)
        clamp(residual, source)
        saturated = int(self.inner.encode(residual, target) or 0)
        decoded = np.empty_like(residual)
        self.inner.decode(target, decoded)
        np.subtract(residual, decoded, out=residual)
        wrong = ~np.isfinite(residual)
        residual[wrong] = 0
        return saturated, int(np.count_nonzero(wrong))

    def decode(self, source: Array, target: Array) -> None:
        """Write encoded values as float32."""
        self.inner.decode(source, target)

    def residuals(
        self,
        key: Any,
        layout: Layout,
        sizes: Sequence[int],
        bring: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, ...]:
        """Return the residuals of a key, zeros at first; what is written to them stays.

        Parameters
        ----------
        key : str or int
            The caller's name of the values.
        layout : tuple
            What they belong to: with another layout the residuals start anew, which is logged as a
            warning.
        sizes : sequence of int
            Their lengths.
        bring : callable, optional
            Returns an array, wherever it is kept, in the memory where it is wanted now: that of a
            device. By default the host's.

        Raises
        ------
        ArgumentTypeError
            If the key is neither a string nor a number, so that it would not be found again.
        """
        check_key(key)
        found = self._kept.get(key)
        if found is not None:
            same = found[0] == layout and [one.size for one in found[1]] == list(sizes)
            if same:
                arrays = tuple(map(_to_host if bring is None else bring, found[1]))
                self._kept[key] = layout, arrays
                return arrays
            _log.warning("error feedback of %r starts anew: %s now, not %s", key, layout, found[0])
        arrays = tuple(np.zeros(size, np.float32) for size in sizes)
        if bring is not None:
            arrays = tuple(map(bring, arrays))
        self._kept[key] = layout, arrays
        return arrays

    def keys(self) -> tuple[Key, ...]:
        """Return the keys that have residuals."""
        return tuple(self._kept)

    def reset(self, key: Key | None = None) -> None:
        """Forget the residuals of a key, of all keys if None. Without any, nothing happens."""
        if key is None:
            self._kept.clear()
        else:
            self._kept.pop(key, None)

    def state_dict(self) -> dict[str, Any]:
        """Return all state of this rank, as copies.

        It belongs to this rank of these: with others, or another number of them, keys start anew.
        """
        residuals = [
            {"key": key, "layout": list(layout), "arrays": [array.copy() for array in arrays]}
            for key, (layout, arrays) in self._kept.items()
        ]
        return {"codec": self.to_dict(), "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned; what was kept before is gone.

        Raises
        ------
        ArgumentValueError
            If it is not such a state, or that of another codec. Then nothing has changed.
        """
        if isinstance(state, np.ndarray) and state.shape == ():
            state = state.item()  # what numpy.savez makes of a dictionary
        try:
            if state["codec"] != self.to_dict():
                raise ArgumentValueError(
                    f"a state of {state['codec']} is not one of {self.to_dict()}"
                )
            kept: dict[Key, tuple[Layout, tuple[Any, ...]]] = {}
            for told in state["residuals"]:
                key = told["key"]
                check_key(key)
                arrays = tuple(np.array(array, np.float32) for array in told["arrays"])
                if not all(one.ndim == 1 and np.isfinite(one).all() for one in arrays):
                    raise ArgumentValueError(f"residuals of {key!r} are not flat, or not finite")
                layout = _hashable(told["layout"])
                hash(layout)
                if key in kept:
                    raise ArgumentValueError(f"residuals of {key!r} twice")
                kept[key] = layout, arrays
        except ArgumentValueError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentValueError(f"no state of error feedback: {error}") from error
        self._kept = kept

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` makes such a codec of, without its state."""
        return {"codec": "error_feedback", "inner": self.inner.to_dict()}

    def __str__(self) -> str:
        return f"{name_of(self.inner)} with error feedback"

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.inner!r}) with {len(self._kept)} keys"


def check_key(key: Any) -> None:
    """Raise `ArgumentTypeError` unless a key will be found again."""
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ArgumentTypeError(
            f"error feedback needs key=, a name that stays the same from step to step, not {key!r}"
        )


def _to_host(kept: Any) -> Array:
    """Return residuals in host memory; those of a device have a `copy` that is there."""
    return kept if isinstance(kept, np.ndarray) else np.asarray(kept.copy())


def _hashable(layout: Any) -> Layout:
    """Return a layout that may have been through JSON."""
    return tuple(_hashable(one) if isinstance(one, list | tuple) else one for one in layout)


readers["error_feedback"] = lambda told: ErrorFeedback(from_dict(told["inner"]))
