"""Schedules on device memory: the programs that run on hosts, given to a stream.

Messages are NCCL's sends and receives, those of a round in one group; reductions are kernels; all
of it goes to one stream in order, and the host waits for nothing. So a run can be captured into a
CUDA graph.
"""

from collections.abc import Callable

from pycomm.call import Call
from pycomm.deadline import Deadline
from pycomm.device.together import send_receive
from pycomm.dtypes import DTYPES, DType, Kind, Op, PremulSum, ReduceOp
from pycomm.kernels.cuda import MOST_SOURCES, Kernels
from pycomm.program import BoundRound, Copy, Piece, Program
from pycomm.stream_memory import StreamMemory, copy
from pycomm.transports.nccl import NCCLComm

__all__ = ["DeviceProgram", "Exchange", "wide_of"]

_SUM, _AVG = ReduceOp.SUM, ReduceOp.AVG


class Exchange:
    """Rounds of messages between the ranks of a communicator, of one run."""

    def __init__(self, comm: NCCLComm, stream: int, deadline: Deadline) -> None:
        self._comm, self._stream, self._deadline = comm, stream, deadline

    def __call__(
        self, sends: list[tuple[int, int, int]], receives: list[tuple[int, int, int]]
    ) -> None:
        """Give one round to the stream; each message is (peer, address, bytes)."""
        if sends or receives:
            code = send_receive(sends, receives, self._comm.handle, self._stream)
            self._comm.settle(code, "ncclGroupEnd", self._deadline)


class DeviceProgram:
    """A program, ready to run with device arrays of one dtype and op.

    Averages and products are what they are on hosts (`pycomm.executor.Execution`): averages that
    are added in steps are divided by a power of two first, those of float16 go in float32, a
    premultiplied sum multiplies first.

    Parameters
    ----------
    program : Program
        Of the dtype that `wide_of` gives for the call's.
    comm, kernels
        The ranks, and the arithmetic.
    dtype : DType
        That of the call.
    op : ReduceOp or PremulSum, optional
        The caller's.
    rounds_once : bool
        Whether all contributions meet in one reduction.
    """

    def __init__(
        self,
        program: Program,
        comm: NCCLComm,
        kernels: Kernels,
        dtype: DType,
        op: Op | None,
        *,
        rounds_once: bool,
    ) -> None:
        self.program = program
        self._comm, self._kernels = comm, kernels
        self._given, self._dtype = dtype, wide_of(dtype, op, rounds_once=rounds_once)
        self._op = op
        size = comm.size
        power = 1 << (size - 1).bit_length()
        self._before: complex | None = None
        self._after: float | None = None
        self._divisor: int | None = None
        self._combine = op
        if isinstance(op, PremulSum):
            self._before, self._combine = op.factor, _SUM
        elif op is _AVG and dtype.kind in (Kind.FLOAT, Kind.COMPLEX):
            self._divisor, self._combine = size, _SUM
        elif op is _AVG and not rounds_once:
            self._combine = _SUM
            if self._dtype is not dtype:
                self._divisor = size
            else:
                self._before, self._after = 1 / power, power / size

    def enqueue(self, call: Call, stream: int, memory: StreamMemory, deadline: Deadline) -> None:
        """Give one run to a stream; the device's context is the current one."""
        with memory.run(stream):
            self._enqueue(call, stream, memory, Exchange(self._comm, stream, deadline))

    def _enqueue(self, call: Call, stream: int, memory: StreamMemory, exchange: Exchange) -> None:
        dtype, item = self._dtype, self._dtype.itemsize
        x = 0 if call.x is None else call.x.pointer
        out = 0 if call.out is None else call.out.pointer
        elements = 0 if call.x is None else call.x.count
        written = 0 if call.out is None else call.out.count
        given, final = x, out
        if dtype is not self._given:
            if elements:
                x = memory.take(elements * item)
                self._kernels.decode("fp16", given, x, elements, stream, shift=None)
            if written:
                out = x if given == final else memory.take(written * item)
        if call.collective == "all_to_all" and call.in_place:
            moved = memory.take(elements * item)
            copy(moved, x, elements * item, stream)
            x = moved
        if self._before is not None and elements:
            product = memory.take(elements * item)
            self._kernels.scale(x, product, dtype, self._before, elements, stream)
            x = product
        work = memory.take(self.program.work * item) if self.program.work else 0
        stage = memory.take(self._stage() * item) if self._stage() else 0
        self._run((x, out, work, stage), stream, exchange, memory)
        if out and self._divisor is not None and self._divisor != 1:
            self._kernels.divide(out, dtype, self._divisor, written, stream)
        if out and self._after is not None and self._after != 1:
            self._kernels.scale(out, out, dtype, self._after, written, stream)
        if dtype is not self._given and out:
            tally = memory.take(16)
            self._kernels.encode(
                "fp16", out, final, written, stream,
                shift=None, saturate=False, peaks=0, tally=tally, residual=0,
            )  # fmt: skip
        if call.collective == "broadcast" and call.target is not None:
            copy(call.target.pointer, given, call.target.nbytes, stream)

    def _stage(self) -> int:
        """Return the elements of scratch of a round, all segments bound."""
        for segment in range(self.program.segments):
            self.program.rounds(segment)
        return self.program.stage

    def _run(
        self,
        memories: tuple[int, int, int, int],
        stream: int,
        exchange: Exchange,
        memory: StreamMemory,
    ) -> None:
        item = self._dtype.itemsize

        def at(piece: Piece) -> int:
            return memories[piece.memory] + piece.start * item

        def copy_all(copies: tuple[Copy, ...]) -> None:
            for source, target in copies:
                copy(at(target), at(source), (source.stop - source.start) * item, stream)

        copy_all(self.program.copies)
        for segment in range(self.program.segments):
            for bound in self.program.rounds(segment):
                copy_all(bound.packs)
                exchange(_messages(bound.sends, memories), _messages(bound.recvs, memories))
                self._reduce(bound, at, stream, memory)
                copy_all(bound.unpacks)

    def _reduce(
        self, bound: BoundRound, at: Callable[[Piece], int], stream: int, memory: StreamMemory
    ) -> None:
        for sources, target in bound.reductions:
            assert self._combine is not None
            count, places = target.stop - target.start, [at(source) for source in sources]
            written = at(target)
            if written in places[MOST_SOURCES:]:
                # Sums of more than one kernel are kept in the target, before it is read there.
                nbytes = count * self._dtype.itemsize
                place = memory.take(nbytes)
                copy(place, written, nbytes, stream)
                places[places.index(written)] = place
            self._kernels.reduce(places, written, self._dtype, self._combine, count, stream)


def wide_of(dtype: DType, op: Op | None, *, rounds_once: bool) -> DType:
    """Return the type that an average in steps is added in: small float16 would vanish."""
    if op is _AVG and not rounds_once and dtype is DTYPES["float16"]:
        return DTYPES["float32"]
    return dtype


def _messages(
    bound: tuple[tuple[int, int, int, int], ...], memories: tuple[int, int, int, int]
) -> list[tuple[int, int, int]]:
    # An empty message says nothing that the order of the stream does not.
    return [
        (peer, memories[memory] + start, stop - start)
        for peer, memory, start, stop in bound
        if stop > start
    ]
