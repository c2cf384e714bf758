"""MPI's own collectives, started non-blocking, where they are right and fast."""

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from pycomm.buffers import Buffer
from pycomm.dtypes import DType, Kind, Op, ReduceOp
from pycomm.scratch import ScratchPool
from pycomm.transports.base import Native
from pycomm.transports.requests import Staged, Test

__all__ = ["Natives"]

_INT_MAX = 2**31 - 1
_FRESH = 32 << 10  # bytes up to which a new copy is cheaper than one in memory of a pool

_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.PROD: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
}

# Returns the test of its request. The caller holds x and out until that is true.
_Start = Callable[..., Test]


class Natives:
    """The collectives of one MPI communicator; all ranks start them in the same order."""

    def __init__(self, comm: MPI.Intracomm, pool: ScratchPool) -> None:
        self._comm = comm
        self._pool = pool
        self._size: int = comm.Get_size()
        self._moving: dict[str, _Start] = {
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
            "gather": self._gather,
            "scatter": self._scatter,
            "barrier": lambda *_: comm.Ibarrier().Test,
        }

    def find(self, collective: str, dtype: DType, op: Op | None, count: int) -> Native | None:
        """Return what starts a collective, None where MPI's is not to be used.

        Moving bytes is right for every dtype. Reducing is left to pycomm where MPI has no datatype
        or a slow one, and for min and max of floats: MPI may lose a NaN, and differently on each
        rank.
        """
        if count * dtype.itemsize > _INT_MAX:
            return None  # MPI's counts are C ints
        if op is None:
            return self._moving[collective]
        return self._reduction(collective, dtype, op, count)

    def _reduction(self, collective: str, dtype: DType, op: Op, count: int) -> Native | None:
        if dtype.mpi is None or not isinstance(op, ReduceOp) or op not in _OPS:
            return None
        if dtype.kind is Kind.FLOAT and op in (ReduceOp.MIN, ReduceOp.MAX):
            return None
        datatype, operation, comm = getattr(MPI, dtype.mpi), _OPS[op], self._comm
        stage, short = self._stage, count * dtype.itemsize <= _FRESH
        if collective == "all_reduce":

            def all_reduce(x: Buffer, out: Buffer, _: int, in_place: bool) -> Test:
                recv = [out.array, count, datatype]
                if not in_place:
                    return comm.Iallreduce([x.array, count, datatype], recv, operation).Test
                if short:
                    x.held = x.array.copy()
                    return comm.Iallreduce([x.held, count, datatype], recv, operation).Test
                held = x.held = stage(x)
                return held.until(comm.Iallreduce([held.octets, count, datatype], recv, operation))

            return all_reduce
        if collective == "reduce":

            def reduce(x: Buffer, out: Buffer | None, root: int, in_place: bool) -> Test:
                send = MPI.IN_PLACE if in_place else [x.array, count, datatype]
                recv = None if out is None else [out.array, count, datatype]
                return comm.Ireduce(send, recv, operation, root).Test

            return reduce

        def reduce_scatter(x: Buffer, out: Buffer, *_: object) -> Test:
            recv = [out.array, count, datatype]
            return comm.Ireduce_scatter_block([x.array, count, datatype], recv, operation).Test

        return reduce_scatter

    def _all_gather(self, x: Buffer, out: Buffer, _: int, in_place: bool) -> Test:
        recv = [out.octets, x.nbytes, MPI.BYTE]
        if not in_place:
            return self._comm.Iallgather([x.octets, x.nbytes, MPI.BYTE], recv).Test
        held = x.held = self._stage(x)
        return held.until(self._comm.Iallgather([held.octets, x.nbytes, MPI.BYTE], recv))

    def _stage(self, x: Buffer) -> "Staged":
        """Return a copy of `x` to send from.

        "In place" must be said on all ranks or none, and ranks may differ here: Open MPI then
        returns wrong sums. So it is said on none.
        """
        return Staged(x, self._pool)

    def _all_to_all(self, x: Buffer, out: Buffer, *_: object) -> Test:
        part = x.nbytes // self._size
        return self._comm.Ialltoall([x.octets, part, MPI.BYTE], [out.octets, part, MPI.BYTE]).Test

    def _broadcast(self, x: Buffer, _: Buffer, root: int, __: bool) -> Test:
        return self._comm.Ibcast([x.octets, x.nbytes, MPI.BYTE], root).Test

    def _gather(self, x: Buffer, out: Buffer | None, root: int, in_place: bool) -> Test:
        send = MPI.IN_PLACE if in_place else [x.octets, x.nbytes, MPI.BYTE]
        recv = None if out is None else [out.octets, x.nbytes, MPI.BYTE]
        return self._comm.Igather(send, recv, root).Test

    def _scatter(self, x: Buffer | None, out: Buffer, root: int, in_place: bool) -> Test:
        send = None if x is None else [x.octets, out.nbytes, MPI.BYTE]
        recv = MPI.IN_PLACE if in_place else [out.octets, out.nbytes, MPI.BYTE]
        return self._comm.Iscatter(send, recv, root).Test
