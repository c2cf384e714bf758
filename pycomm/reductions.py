"""The collectives that reduce."""

from typing import Any

from pycomm.arguments import new_array, own_slot, part_of, rank_of, reduce_op, same_shape
from pycomm.buffers import Buffer, as_buffer
from pycomm.dtypes import Kind, PremulSum, ReduceOp
from pycomm.engine import Call
from pycomm.kernels.host import divide, premultiply
from pycomm.member import Member

__all__ = ["Reductions"]

_DIVIDED = (Kind.FLOAT, Kind.COMPLEX)  # where an average is a sum, divided afterwards


class Reductions(Member):
    """all_reduce, reduce and reduce_scatter; see `Communicator` for what they have in common."""

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Any = "sum",
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks element by element; every rank gets the result.

        Parameters
        ----------
        x : array
            Contribution of this rank, of equal dtype and count on all ranks.
        out : array, optional
            Receives the result, of the dtype and count of `x`; `x` itself by default.
        op : str, ReduceOp or PremulSum
            ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"avg"`` or `pycomm.premul_sum`. Integer
            sums wrap; integer averages round toward zero; halves accumulate in float32 and round
            once; min and max return NaN where any rank has NaN.

        Returns
        -------
        array or Work
            `out`, or `x` in place.
        """
        source = as_buffer(x, writable=out is None)
        target, in_place = same_shape(source, out)
        op = reduce_op(op, source)
        finish = None
        if type(op) is PremulSum:
            premultiply(source.flat, target.flat, source.dtype, op)
            source, in_place, op = target, True, ReduceOp.SUM
        elif op is ReduceOp.AVG and source.dtype.kind in _DIVIDED:
            op, finish = ReduceOp.SUM, lambda: divide(target.flat, self._size)
        call = Call(
            "all_reduce", source, target, target, source.dtype, source.count, op, -1, in_place,
            finish,
        )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op)

    def reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Any = "sum",
        root: int = 0,
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks element by element at `root`.

        Parameters
        ----------
        x : array
            Contribution of this rank, of equal dtype and count on all ranks.
        out : array, optional
            Receives the result on `root`; `x` itself by default. Ignored on other ranks.
        op : str, ReduceOp or PremulSum
            As in `all_reduce`.
        root : int
            The rank that gets the result.

        Returns
        -------
        array, None or Work
            The result on `root`, None elsewhere, where `x` is left as it is.
        """
        root = rank_of(root, self._size, "root")
        at_root = self._rank == root
        source = as_buffer(x, writable=at_root and out is None)
        op = reduce_op(op, source)
        target: Buffer | None = None
        in_place = False
        if at_root:
            target, in_place = same_shape(source, out)
        finish = None
        if type(op) is PremulSum:
            product = new_array(source) if target is None else target
            premultiply(source.flat, product.flat, source.dtype, op)
            source, in_place, op = product, at_root, ReduceOp.SUM
        elif op is ReduceOp.AVG and source.dtype.kind in _DIVIDED:
            op = ReduceOp.SUM
            if target is not None:
                whole = target.flat
                finish = lambda: divide(whole, self._size)  # noqa: E731
        call = Call(
            "reduce", source, target, target, source.dtype, source.count, op, root, in_place,
            finish,
        )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op)

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Any = "sum",
        algorithm: str = "auto",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks element by element; rank i gets the i-th part of the result.

        Parameters
        ----------
        x : array
            Contribution of this rank, of equal dtype and count on all ranks: `size` parts along
            axis 0.
        out : array, optional
            Receives this rank's part, ``x.size // size`` elements; a new array by default. It may
            be this rank's part of `x` itself.
        op : str, ReduceOp or PremulSum
            As in `all_reduce`.

        Returns
        -------
        array or Work
            `out`.
        """
        source = as_buffer(x)
        op = reduce_op(op, source)
        target = part_of(source, out, self._size)
        if type(op) is PremulSum:
            product = new_array(source)
            premultiply(source.flat, product.flat, source.dtype, op)
            source, op = product, ReduceOp.SUM
        divided = op is ReduceOp.AVG and source.dtype.kind in _DIVIDED
        # MPI's own reduce_scatter knows no such thing as an output within the input.
        result = target
        if own_slot(source, target, self._rank):
            result = new_array(target)

        def finish() -> None:
            if divided:
                divide(result.flat, self._size)
            if result is not target:
                target.flat[:] = result.flat

        call = Call(
            "reduce_scatter", source, result, target, source.dtype, target.count,
            ReduceOp.SUM if divided else op, -1, False, finish,
        )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op)
