"""Collectives on device memory whose messages are encoded; see `pycomm.encoded` for the scheme.

Encoding, sums and decoding are kernels, in the order of one stream, with the bits that hosts get
where they do not cut the data into segments. Residuals of error feedback stay on the device.
"""

from typing import Any

import numpy as np

from pycomm.algorithms.compression import Cast, Codec, ErrorFeedback
from pycomm.algorithms.compression.codec import name_of
from pycomm.algorithms.schedule import spans
from pycomm.call import Call
from pycomm.deadline import Deadline
from pycomm.device.programs import Exchange
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.devices import Device
from pycomm.dtypes import DTYPES, Op, ReduceOp
from pycomm.errors import ArgumentTypeError
from pycomm.kernels.cuda import MOST_SOURCES, Kernels
from pycomm.stream_memory import StreamMemory
from pycomm.transports.nccl import NCCLComm

__all__ = ["DeviceEncoded"]

_ITEM = 4  # bytes of a float32
_ALIGNMENT = 256


class DeviceEncoded:
    """All_reduce, reduce_scatter or all_gather of float32 with encoded messages.

    Every rank sends to every other one, as the algorithm ``"direct"`` does.

    Parameters
    ----------
    collective : str
        Which.
    comm, kernels
        The ranks, and the arithmetic.
    codec : Codec
        A `Cast`, the only one that there are kernels for; without its state.
    op : ReduceOp, optional
        Sum or average.
    count : int
        Elements of the smaller side.
    tally : DeviceArray
        Two uint64: values that were too large, and errors that were dropped.

    Attributes
    ----------
    bytes_sent, plain_bytes : int
        Bytes that this rank sends, and those that it would send without a codec.
    rounds : int
        Rounds of messages.
    """

    def __init__(
        self,
        collective: str,
        comm: NCCLComm,
        kernels: Kernels,
        codec: Codec,
        op: Op | None,
        count: int,
        tally: DeviceArray,
    ) -> None:
        if type(codec) is not Cast:
            raise ArgumentTypeError(
                f"on devices compression is by pycomm's own casts, not by {name_of(codec)}: there "
                "are no kernels for others"
            )
        if comm.size > MOST_SOURCES:
            raise ArgumentTypeError(
                f"compression of device arrays is for up to {MOST_SOURCES} ranks, not {comm.size}"
            )
        self._comm, self._kernels, self._codec = comm, kernels, codec
        self._collective, self._count = collective, count
        self._tally = tally
        self._shift = codec.block.bit_length() - 1 if codec.block else None
        self._divisor, self._after = 1, 1
        rank, size = comm.rank, comm.size
        average = op is ReduceOp.AVG
        if collective == "all_reduce":
            self._bounds = spans(count, size)
            own = self._bounds[rank][1] - self._bounds[rank][0]
            power = 2 ** (size - 1).bit_length()
            self._divisor, self._after = (size, 1) if average else (power, power)
            self._layout: tuple[Any, ...] = (collective, count, 1, str(op), 1, rank, *range(size))
            self._sizes: tuple[int, ...] = (count, own)
            self.rounds = 2
            others = [stop - start for start, stop in self._bounds]
            del others[rank]
            self.bytes_sent = sum(map(codec.encoded_size, others))
            self.bytes_sent += (size - 1) * codec.encoded_size(own)
            self.plain_bytes = _ITEM * (sum(others) + (size - 1) * own)
        else:
            self._bounds = [(one * count, (one + 1) * count) for one in range(size)]
            self._divisor = size if average else 1
            self._layout = (collective, count, str(op or ""), 1, rank, *range(size))
            reduces = collective == "reduce_scatter"
            self._sizes = ((size - 1) * count if reduces else count,)
            self.rounds = 1
            self.bytes_sent = (size - 1) * codec.encoded_size(count)
            self.plain_bytes = (size - 1) * _ITEM * count

    def enqueue(self, call: Call, stream: int, memory: StreamMemory, deadline: Deadline) -> None:
        """Give one run to a stream; the device's context is the current one."""
        assert call.x is not None
        assert call.out is not None
        residuals = self._residuals(call)
        x, out = call.x.pointer, call.out.pointer
        step = getattr(self, f"_{self._collective}")
        with memory.run(stream):
            step(x, out, residuals, memory, stream, Exchange(self._comm, stream, deadline))

    def _residuals(self, call: Call) -> tuple[int, ...]:
        """Return the addresses of the residuals of a call; zeros without error feedback."""
        codec = call.codec
        if not isinstance(codec, ErrorFeedback):
            return (0, 0)
        device = self._comm.device

        def bring(kept: Any) -> DeviceArray:
            return _on(device, kept)

        arrays = codec.residuals(call.key, self._layout, self._sizes, bring)
        return tuple(array.pointer for array in arrays)

    def _encode(
        self, source: int, target: int, count: int, residual: int, memory: StreamMemory, stream: int
    ) -> None:
        codec, shift = self._codec, self._shift
        peaks = 0
        if shift is not None and count:
            peaks = memory.take(4 * (-(-count >> shift)))
        assert codec.saturate is not None
        self._kernels.encode(
            codec.format, source, target, count, stream,
            shift=shift, saturate=codec.saturate, peaks=peaks, tally=self._tally.pointer,
            residual=residual,
        )  # fmt: skip

    def _decode(self, codes: list[int], out: int, stream: int) -> None:
        """Decode the pieces of all ranks into their places in the result."""
        for source, (start, stop) in zip(codes, self._bounds, strict=True):
            self._kernels.decode(
                self._codec.format, source, out + start * _ITEM, stop - start, stream,
                shift=self._shift,
            )  # fmt: skip

    def _pieces(self, sizes: list[int], memory: StreamMemory) -> list[int]:
        """Return the addresses of aligned pieces of one block of scratch."""
        room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        at = memory.take(sum(room))
        starts = []
        for size in room:
            starts.append(at)
            at += size
        return starts

    def _all_reduce(
        self,
        x: int,
        out: int,
        residuals: tuple[int, ...],
        memory: StreamMemory,
        stream: int,
        exchange: Exchange,
    ) -> None:
        size_of, rank, size = self._codec.encoded_size, self._comm.rank, self._comm.size
        lengths = [stop - start for start, stop in self._bounds]
        starts = [start for start, _ in self._bounds]
        own = lengths[rank]
        sizes = [size_of(length) for length in lengths]
        gone = self._pieces(sizes, memory)
        come = self._pieces([sizes[rank]] * size, memory)
        peers = [peer for peer in range(size) if peer != rank]
        kept, kept_own = residuals
        for peer in peers:
            at = starts[peer] * _ITEM
            self._encode(x + at, gone[peer], lengths[peer], kept and kept + at, memory, stream)
        exchange(
            [(peer, gone[peer], sizes[peer]) for peer in peers if lengths[peer]],
            [(peer, come[peer], sizes[rank]) for peer in peers if own],
        )
        (total,) = self._pieces([own * _ITEM], memory)
        self._kernels.add_up(
            self._codec.format, come, rank, x + starts[rank] * _ITEM, total, self._divisor, own,
            stream, shift=self._shift,
        )  # fmt: skip
        self._encode(total, gone[rank], own, kept_own, memory, stream)
        result = self._pieces(sizes, memory)
        exchange(
            [(peer, gone[rank], sizes[rank]) for peer in peers if own],
            [(peer, result[peer], sizes[peer]) for peer in peers if lengths[peer]],
        )
        result[rank] = gone[rank]
        self._decode(result, out, stream)
        if self._after != 1:
            row = DTYPES["float32"]
            self._kernels.scale(out, out, row, float(self._after), sum(lengths), stream)

    def _reduce_scatter(
        self,
        x: int,
        out: int,
        residuals: tuple[int, ...],
        memory: StreamMemory,
        stream: int,
        exchange: Exchange,
    ) -> None:
        rank, size, count = self._comm.rank, self._comm.size, self._count
        encoded = self._codec.encoded_size(count)
        gone = self._pieces([encoded] * size, memory)
        come = self._pieces([encoded] * size, memory)
        peers = [peer for peer in range(size) if peer != rank]
        kept = residuals[0]
        for slot, peer in enumerate(peers):
            at = kept and kept + slot * count * _ITEM
            self._encode(x + peer * count * _ITEM, gone[peer], count, at, memory, stream)
        if count:
            exchange(
                [(peer, gone[peer], encoded) for peer in peers],
                [(peer, come[peer], encoded) for peer in peers],
            )
        self._kernels.add_up(
            self._codec.format, come, rank, x + rank * count * _ITEM, out, self._divisor, count,
            stream, shift=self._shift,
        )  # fmt: skip

    def _all_gather(
        self,
        x: int,
        out: int,
        residuals: tuple[int, ...],
        memory: StreamMemory,
        stream: int,
        exchange: Exchange,
    ) -> None:
        rank, size, count = self._comm.rank, self._comm.size, self._count
        encoded = self._codec.encoded_size(count)
        codes = self._pieces([encoded] * size, memory)
        peers = [peer for peer in range(size) if peer != rank]
        self._encode(x, codes[rank], count, residuals[0], memory, stream)
        if count:
            exchange(
                [(peer, codes[rank], encoded) for peer in peers],
                [(peer, codes[peer], encoded) for peer in peers],
            )
        self._decode(codes, out, stream)

    def describe(self) -> list[str]:
        """Return the lines of a plan that tell what is done."""
        return [
            f"  steps      {self.rounds}, each direct to all other ranks",
            f"  sends      {self.bytes_sent:,} bytes from this rank instead of "
            f"{self.plain_bytes:,}, as {name_of(self._codec)}",
        ]


def _on(device: Device, kept: Any) -> DeviceArray:
    """Return residuals in the memory of a device."""
    if isinstance(kept, DeviceArray):
        if kept.device == device.ordinal:
            return kept
        kept = kept.copy()
    return allocate(device, (kept.size,), DTYPES["float32"]).fill(np.asarray(kept))
