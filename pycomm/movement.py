"""The collectives that move data, and the barrier."""

from functools import partial
from typing import Any

import numpy as np

from pycomm.arguments import (
    check_axis,
    codec_of,
    new_array,
    own_slot,
    part_count,
    part_of,
    rank_of,
    same_shape,
    whole_of,
)
from pycomm.buffers import Buffer, as_buffer, new_like
from pycomm.call import Call
from pycomm.dtypes import DTYPES
from pycomm.errors import ArgumentValueError
from pycomm.member import Member

__all__ = ["Movement"]


class Movement(Member):
    """all_gather, all_to_all, broadcast, gather, scatter, barrier; see `Communicator`."""

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        compression: Any = None,
        key: str | int | None = None,
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join `x` of all ranks along axis 0, in rank order; every rank gets the result.

        Parameters
        ----------
        x : array
            Part of this rank, of equal dtype and count on all ranks.
        out : array, optional
            Receives the result, ``size * x.size`` elements; a new array by default. `x` may be this
            rank's part of it.
        compression : str or Codec, optional
            What is sent is encoded, for instance ``"bf16"`` or `ErrorFeedback`; see the guide. For
            float32. All parts are rounded, on their own rank too, so that all have the same.
        key : str or int, optional
            The caller's name for `x`, the same from step to step: error feedback keeps its residual
            under it.

        Returns
        -------
        array or Work
            `out`.
        """
        known = None
        if out is not None and compression is None:
            known = ("all_gather", id(x), id(out), algorithm)
            if self._engine.quick is not None and self._quickly(
                known, x, out, stream, timeout, async_op
            ):
                return out
        call = self._engine.known(known)
        if call is None:
            source = as_buffer(x)
            target = whole_of(source, out, self._size)
            in_place = own_slot(target, source, self._rank)
            codec = codec_of(compression, key, source)
            call = Call(
                "all_gather", source, target, target, source.dtype, source.count,
                in_place=in_place, codec=codec, key=key,
            )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op, known, stream)

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send the i-th part of `x` to rank i, and join what all ranks send, in rank order.

        Parameters
        ----------
        x : array
            `size` parts along axis 0, of equal dtype and count on all ranks.
        out : array, optional
            Receives the result, of the dtype and count of `x`; a new array by default. It may be
            `x` itself.

        Returns
        -------
        array or Work
            `out`.
        """
        key = None if out is None else ("all_to_all", id(x), id(out), algorithm)
        if (
            key is not None
            and self._engine.quick is not None
            and self._quickly(key, x, out, stream, timeout, async_op)
        ):
            return out
        call = self._engine.known(key)
        if call is None:
            source = as_buffer(x)
            part = part_count(source, self._size)
            if out is None:
                check_axis(source, self._size)
                target, in_place = new_like(source, source.shape), False
            else:
                target, in_place = same_shape(source, out)
            prepare = None
            if in_place and source.device is None:
                given, source = source, new_array(source)
                prepare = partial(np.copyto, source.flat, given.flat)
            call = Call(
                "all_to_all", source, target, target, source.dtype, part,
                in_place=in_place and source.device is not None, prepare=prepare,
            )  # fmt: skip
        return self._engine.run(call, algorithm, timeout, async_op, key, stream)

    def broadcast(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        algorithm: str = "auto",
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send `x` of `root` to all ranks.

        Parameters
        ----------
        x : array
            What `root` sends, and on the other ranks what receives it, of equal dtype and count.
        out : array, optional
            Receives the data instead, on all ranks; `x` is then read on `root` only, and may be
            None elsewhere.
        root : int
            The rank that sends.

        Returns
        -------
        array or Work
            `out`, or `x` in place.
        """
        root = rank_of(root, self._size, "root")
        key = ("broadcast", id(x), id(out), root, algorithm)
        if self._engine.quick is not None and self._quickly(key, x, out, stream, timeout, async_op):
            return x if out is None else out
        call = self._engine.known(key)
        if call is None:
            at_root = self._rank == root
            finish = None
            if out is None:
                moved = target = as_buffer(x, writable=not at_root)
            elif at_root:
                moved = as_buffer(x)
                target, in_place = same_shape(moved, out)
                if not in_place and moved.device is None:
                    finish = partial(np.copyto, target.flat, moved.flat)
            else:
                moved = target = as_buffer(out, writable=True, name="out")
            call = Call(
                "broadcast", moved, None, target, moved.dtype, moved.count, root=root, finish=finish
            )
        return self._engine.run(call, algorithm, timeout, async_op, key, stream)

    def gather(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        algorithm: str = "auto",
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join `x` of all ranks along axis 0, in rank order, at `root`.

        Parameters
        ----------
        x : array
            Part of this rank, of equal dtype and count on all ranks.
        out : array, optional
            Receives the result on `root`, ``size * x.size`` elements; a new array by default. `x`
            may be the root's part of it. Ignored on other ranks.
        root : int
            The rank that gets the result.

        Returns
        -------
        array, None or Work
            The result on `root`, None elsewhere.
        """
        root = rank_of(root, self._size, "root")
        key = None if out is None else ("gather", id(x), id(out), root, algorithm)
        call = self._engine.known(key)
        if call is None:
            source = as_buffer(x)
            target = whole_of(source, out, self._size) if self._rank == root else None
            in_place = target is not None and own_slot(target, source, self._rank)
            call = Call(
                "gather", source, target, target, source.dtype, source.count, None, root, in_place
            )
        return self._engine.run(call, algorithm, timeout, async_op, key, stream)

    def scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        root: int = 0,
        algorithm: str = "auto",
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send the i-th part of the root's `x` along axis 0 to rank i.

        Parameters
        ----------
        x : array
            `size` parts, on `root`; ignored on other ranks, where it may be None.
        out : array
            Receives this rank's part. On `root` a new array by default, and it may be the root's
            part of `x`; needed on the other ranks, which cannot know what comes.
        root : int
            The rank that sends.

        Returns
        -------
        array or Work
            `out`.
        """
        root = rank_of(root, self._size, "root")
        key = None if out is None else ("scatter", id(x), id(out), root, algorithm)
        call = self._engine.known(key)
        if call is None:
            source: Buffer | None = None
            in_place = False
            if self._rank == root:
                source = as_buffer(x)
                target = part_of(source, out, self._size)
                in_place = own_slot(source, target, self._rank)
            elif out is None:
                raise ArgumentValueError(
                    f"scatter needs out= on rank {self._rank}: only rank {root}, the root, knows "
                    "what it sends"
                )
            else:
                target = as_buffer(out, writable=True, name="out")
            call = Call(
                "scatter", source, target, target, target.dtype, target.count, None, root, in_place
            )
        return self._engine.run(call, algorithm, timeout, async_op, key, stream)

    def barrier(
        self, *, algorithm: str = "auto", timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Wait until all ranks have called it."""
        call = Call("barrier", None, None, None, DTYPES["uint8"], 0)
        return self._engine.run(call, algorithm, timeout, async_op)
