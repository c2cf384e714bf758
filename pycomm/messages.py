"""Point to point, and Python objects."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from pycomm.arguments import rank_of
from pycomm.buffers import Buffer, as_buffer, same_memory
from pycomm.call import Call
from pycomm.dtypes import DTYPES
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError, describe
from pycomm.member import Member

__all__ = ["Messages"]


class Messages(Member):
    """send, recv, send_recv, and collectives of objects; see `Communicator`."""

    def send(
        self,
        x: Any,
        dest: int,
        *,
        tag: int = 0,
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send `x` to rank `dest`.

        Small messages may be on their way when this returns, large ones have been received; do
        not rely on either.

        Parameters
        ----------
        x : array
            What to send.
        dest : int
            The receiving rank.
        tag : int
            Only a receive with the same tag matches.

        Returns
        -------
        array or Work
            `x`.
        """
        source = as_buffer(x)
        parts = [(rank_of(dest, self._size, "dest"), source, False)]
        return self._message("send", parts, tag, lambda: x, stream, timeout, async_op)

    def recv(
        self,
        out: Any,
        source: int,
        *,
        tag: int = 0,
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive into `out` from rank `source`.

        Parameters
        ----------
        out : array
            Receives a message of exactly its size; another size raises `MismatchError`.
        source : int
            The sending rank.
        tag : int
            The tag of the send. Messages of one tag arrive in the order they were sent.

        Returns
        -------
        array or Work
            `out`.
        """
        target = as_buffer(out, writable=True, name="out")
        parts = [(rank_of(source, self._size, "source"), target, True)]
        return self._message("recv", parts, tag, lambda: out, stream, timeout, async_op)

    def send_recv(
        self,
        x: Any,
        out: Any,
        *,
        dest: int,
        source: int,
        tag: int = 0,
        stream: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send `x` to `dest` and receive into `out` from `source`, both in flight together.

        Returns
        -------
        array or Work
            `out`.
        """
        sent = as_buffer(x)
        target = as_buffer(out, writable=True, name="out")
        if same_memory(sent, target):
            raise ArgumentValueError("x and out are the same memory; send_recv needs two arrays")
        parts = [
            (rank_of(source, self._size, "source"), target, True),
            (rank_of(dest, self._size, "dest"), sent, False),
        ]
        return self._message("send_recv", parts, tag, lambda: out, stream, timeout, async_op)

    def _message(
        self,
        operation: str,
        parts: list[tuple[int, Any, bool]],
        tag: Any,
        result: Callable[[], Any],
        stream: Any,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        number = self._tag(tag)
        places = {buffer.device is None for _, buffer, _ in parts}
        if len(places) > 1:
            raise ArgumentTypeError("one of x and out is on the host and the other on a device")
        if places == {False}:
            if number:
                raise ArgumentValueError(
                    f"tag={number}: NCCL has no tags; messages of device arrays arrive in the "
                    "order of their sends"
                )
            side = self._engine.on_device()
            return side.message(operation, parts, result, timeout, async_op, stream)
        if stream is not None:
            raise ArgumentTypeError("stream= is for device arrays; these are on the host")
        return self._engine.message(operation, parts, number, result, timeout, async_op)

    def _tag(self, tag: Any) -> int:
        if isinstance(tag, bool) or not isinstance(tag, int | np.integer):
            raise ArgumentTypeError(f"tag is an int, not {type(tag).__name__}")
        if not 0 <= tag < self._engine.transport.tag_limit:
            raise ArgumentValueError(f"tag={tag} is not in [0, {self._engine.transport.tag_limit})")
        return int(tag)

    def broadcast_object(
        self, obj: Any = None, *, root: int = 0, timeout: float | None = None
    ) -> Any:
        """Send a Python object of `root` to all ranks, by pickle.

        Parameters
        ----------
        obj : object
            What `root` sends; ignored elsewhere.
        root : int
            The rank that sends.

        Returns
        -------
        object
            The object: itself on `root`, a copy elsewhere.

        Raises
        ------
        CommError
            On the other ranks, if `root` could not pickle its object; `root` raises the error of
            pickle itself. The communicator stays usable.
        """
        root = rank_of(root, self._size, "root")
        payload, failure = _pickled(obj) if self._rank == root else (b"", None)
        head = np.array([len(payload), failure is not None], np.int64)
        self._broadcast(head, root, timeout)
        data = (
            np.frombuffer(payload, np.uint8)
            if self._rank == root
            else np.empty(int(head[0]), np.uint8)
        )
        self._broadcast(data, root, timeout)
        if failure is not None:
            raise failure
        if self._rank == root:
            return obj
        received = pickle.loads(data.data)  # noqa: S301 - the ranks of a job trust each other
        if head[1]:
            raise CommError(
                f"broadcast_object: rank {root} could not pickle its object: {received}",
                operation="broadcast_object",
                rank=self._rank,
            )
        return received

    def all_gather_object(self, obj: Any, *, timeout: float | None = None) -> list[Any]:
        """Gather a Python object of every rank on every rank, by pickle.

        Returns
        -------
        list
            One object a rank, in rank order; the own one is a copy too.

        Raises
        ------
        CommError
            On every rank, if any could not pickle its object; there the cause is the error of
            pickle. The communicator stays usable.
        """
        payload, failure = _pickled(obj)
        heads = np.empty((self._size, 2), np.int64)
        head = np.array([len(payload), failure is not None], np.int64)
        self._all_gather(head, heads, timeout)
        longest = int(heads[:, 0].max())
        padded = np.zeros(longest, np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = np.empty((self._size, longest), np.uint8)
        self._all_gather(padded, rows, timeout)
        objects = [
            pickle.loads(row[:length].data)  # noqa: S301 - the ranks of a job trust each other
            for row, length in zip(rows, heads[:, 0].tolist(), strict=True)
        ]
        failed = [rank for rank in range(self._size) if heads[rank, 1]]
        if failed:
            told = "; ".join(f"rank {rank}: {objects[rank]}" for rank in failed)
            raise CommError(
                f"all_gather_object: objects that could not be pickled: {told}",
                operation="all_gather_object",
                rank=self._rank,
            ) from failure
        return objects

    def _broadcast(self, array: np.ndarray[Any, Any], root: int, timeout: float | None) -> None:
        buffer = _plain(array)
        call = Call(
            "broadcast", buffer, None, None, buffer.dtype, buffer.count, root=root,
            operation="broadcast_object",
        )  # fmt: skip
        self._engine.run(call, "auto", timeout, False)

    def _all_gather(
        self, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any], timeout: float | None
    ) -> None:
        source, target = _plain(x), _plain(out)
        call = Call(
            "all_gather", source, target, None, source.dtype, source.count,
            operation="all_gather_object",
        )  # fmt: skip
        self._engine.run(call, "auto", timeout, False)


def _plain(array: np.ndarray[Any, Any]) -> Buffer:
    return Buffer(array, DTYPES[array.dtype.name], array)


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """Return the pickled object, or the pickled text of why that failed, and the failure."""
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:
        return pickle.dumps(describe(error)), error
