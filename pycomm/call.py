"""One collective, checked and ready to start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pycomm.algorithms.compression import Codec, ErrorFeedback
from pycomm.buffers import Buffer
from pycomm.dtypes import DType, Op

if TYPE_CHECKING:
    from pycomm.device_buffers import DeviceBuffer

__all__ = ["Call"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Call:
    """One collective, checked and ready to start.

    `count` is the number of elements of the smaller side, which is equal on all ranks; `target`
    holds the result; `prepare` is what to do before anything is sent, `finish` what remains once
    the data is there; `asked` is the caller's op where `op` is another one; `deterministic` asks
    for a fixed order of reduction, the communicator's setting if None; `bound` is what an execution
    has found out about these arrays, for the next time, `choice` what runs a call that is known;
    `codec` encodes what is sent, if anything does, and `key` is the caller's name for it.
    """

    collective: str
    x: Buffer | None
    out: Buffer | None
    target: Buffer | None
    dtype: DType
    count: int
    op: Op | None = None
    root: int = -1
    in_place: bool = False
    prepare: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    operation: str = ""
    asked: Op | None = None
    deterministic: bool | None = None
    bound: Any = None
    choice: Any = None
    codec: Codec | None = None
    key: Any = None

    @property
    def wire(self) -> Codec | None:
        """The codec without its state: what is equal on all ranks."""
        codec = self.codec
        return codec.inner if isinstance(codec, ErrorFeedback) else codec

    @property
    def device_buffers(self) -> "tuple[DeviceBuffer, ...]":
        """Its buffers, each once, where they are in the memory of a device."""
        found = {id(one): one for one in (self.x, self.out, self.target) if one is not None}
        return cast("tuple[DeviceBuffer, ...]", tuple(found.values()))

    @property
    def on_device(self) -> bool:
        """Whether its arrays are in the memory of a device."""
        buffer = self.x or self.target
        return buffer is not None and buffer.device is not None

    def flat(self) -> tuple[Array | None, Array | None]:
        """Return input and output as one-dimensional views, None where this rank has none."""
        return (
            None if self.x is None else self.x.flat,
            None if self.out is None else self.out.flat,
        )

    def result(self) -> Any:
        """Do what remains, and return the caller's array."""
        if self.finish is not None:
            self.finish()
        return None if self.target is None else self.target.result()
