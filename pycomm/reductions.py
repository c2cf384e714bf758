"""The collectives that reduce."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pycomm.arguments import codec_of, new_array, own_slot, part_of, rank_of, reduce_op, same_shape
from pycomm.buffers import Buffer, as_buffer
from pycomm.call import Call
from pycomm.dtypes import Kind, Op, PremulSum, ReduceOp
from pycomm.kernels.host import divide, premultiply
from pycomm.member import Member

__all__ = ["Reductions"]

_SUM, _AVG = ReduceOp.SUM, ReduceOp.AVG  # looking a member up takes a while in Python 3.11
_DIVIDED = (Kind.FLOAT, Kind.COMPLEX)  # where an average is a sum, divided afterwards

_Step = Callable[[], None] | None


def _around_sum(
    op: Op, source: Buffer, product: Buffer | None, result: Buffer | None, size: int
) -> tuple[Op, _Step, _Step]:
    """Return the operation to run, and what has to be done before and after it.

    Averages are sums that are divided, premultiplied sums are sums of products. `product` receives
    the products (None: make no use of them here), `result` is where the sum arrives, if it does.
    """
    if isinstance(op, PremulSum):
        assert product is not None
        return _SUM, partial(premultiply, source.flat, product.flat, source.dtype, op), None
    if op is _AVG and source.dtype.kind in _DIVIDED:
        return _SUM, None, None if result is None else partial(divide, result.flat, size)
    return op, None, None


def _put(divided: _Step, result: Buffer, target: Buffer) -> None:
    """Finish a result, and put it where it belongs."""
    if divided is not None:
        divided()
    target.flat[:] = result.flat


class Reductions(Member):
    """all_reduce, reduce and reduce_scatter; see `Communicator` for what they have in common."""

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Any = "sum",
        algorithm: str = "auto",
        compression: Any = None,
        key: str | int | None = None,
        deterministic: bool | None = None,
        stream: Any = None,
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
        compression : str or Codec, optional
            What is sent is encoded, for instance ``"bf16"`` or `ErrorFeedback`; see the guide. For
            float32 and the operations sum and avg.
        key : str or int, optional
            The caller's name for `x`, the same from step to step: error feedback keeps its residual
            under it.

        Returns
        -------
        array or Work
            `out`, or `x` in place.
        """
        known = None
        if compression is None:
            known = ("all_reduce", id(x), id(out), op, algorithm, deterministic)
            if self._engine.quick is not None and self._quickly(
                known, x, out, stream, timeout, async_op
            ):
                return x if out is None else out
        call = self._engine.known(known)
        if call is None:
            source = as_buffer(x, out is None)
            target, in_place = same_shape(source, out)
            asked = op = reduce_op(op, source)
            codec = codec_of(compression, key, source, op)
            prepare = finish = None
            if op is not _SUM and codec is None and source.device is None:
                op, prepare, finish = _around_sum(op, source, target, target, self._size)
                if prepare is not None:
                    source, in_place = target, True
            call = Call(
                "all_reduce", source, target, target, source.dtype, source.count, op, -1, in_place,
                prepare, finish, "", asked, deterministic, codec=codec, key=key,
            )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op, known, stream)

    def reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Any = "sum",
        root: int = 0,
        algorithm: str = "auto",
        deterministic: bool | None = None,
        stream: Any = None,
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
        known = ("reduce", id(x), id(out), op, root, algorithm, deterministic)
        call = self._engine.known(known)
        if call is None:
            at_root = self._rank == root
            source = as_buffer(x, writable=at_root and out is None)
            asked = op = reduce_op(op, source)
            target: Buffer | None = None
            in_place = False
            if at_root:
                target, in_place = same_shape(source, out)
            # Other ranks keep their x, so the products need a place of their own.
            product = target
            prepare = finish = None
            if source.device is None:
                if product is None and isinstance(op, PremulSum):
                    product = new_array(source)
                op, prepare, finish = _around_sum(op, source, product, target, self._size)
            if prepare is not None:
                assert product is not None
                source, in_place = product, at_root
            call = Call(
                "reduce", source, target, target, source.dtype, source.count, op, root, in_place,
                prepare, finish, "", asked, deterministic,
            )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op, known, stream)

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Any = "sum",
        algorithm: str = "auto",
        compression: Any = None,
        key: str | int | None = None,
        deterministic: bool | None = None,
        stream: Any = None,
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
        compression, key
            As in `all_reduce`.

        Returns
        -------
        array or Work
            `out`.
        """
        known = None
        if out is not None and compression is None:
            known = ("reduce_scatter", id(x), id(out), op, algorithm, deterministic)
            if self._engine.quick is not None and self._quickly(
                known, x, out, stream, timeout, async_op
            ):
                return out
        call = self._engine.known(known)
        if call is None:
            source = as_buffer(x)
            asked = op = reduce_op(op, source)
            target = part_of(source, out, self._size)
            codec = codec_of(compression, key, source, op)
            inside = own_slot(source, target, self._rank)
            result = target
            prepare = finish = None
            if source.device is None:
                # MPI's own reduce_scatter knows no such thing as an output within the input.
                result = new_array(target) if inside else target
                product = new_array(source) if isinstance(op, PremulSum) else None
                divided: _Step = None
                if codec is None:
                    op, prepare, divided = _around_sum(op, source, product, result, self._size)
                if product is not None:
                    source = product
                finish = partial(_put, divided, result, target) if inside else divided

            call = Call(
                "reduce_scatter", source, result, target, source.dtype, target.count, op, -1, False,
                prepare, finish, "", asked, deterministic, codec=codec, key=key,
            )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op, known, stream)
