"""Many small arrays reduced in few calls, while the caller goes on computing."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from pycomm.algorithms.compression import ErrorFeedback, as_codec
from pycomm.algorithms.compression.codec import name_of
from pycomm.arguments import reduce_op
from pycomm.buffers import as_buffer
from pycomm.dtypes import ReduceOp, as_dtype, as_op
from pycomm.errors import ArgumentTypeError, ArgumentValueError, MismatchError

if TYPE_CHECKING:
    from pycomm.communicator import Communicator
    from pycomm.work import Work

__all__ = ["GradientBuckets"]

Array = np.ndarray[Any, Any]

# How many sets of buckets without a name each error feedback has served.
_served: "WeakKeyDictionary[ErrorFeedback, int]" = WeakKeyDictionary()


def _as_array(x: Any, what: str) -> Array:
    """Return an array of any origin as one of NumPy, without a copy where that can be."""
    if hasattr(x, "__cuda_array_interface__"):
        raise ArgumentTypeError(f"{what} is on a device, and these buckets are in host memory")
    try:
        if not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        return np.asarray(x)
    except Exception as error:
        raise ArgumentTypeError(f"{what} is no array: {error}") from error


@dataclass(eq=False)
class _Bucket:
    """Arrays that are reduced together, one after the other in one registered array."""

    flat: Array
    names: list[str]
    compressed: bool
    key: str
    missing: set[str] = field(default_factory=set)
    work: "Work | None" = None


class GradientBuckets:
    """Reduces the gradients of a step in buckets, each as soon as it is full; collective to make.

    ::

        buckets = pycomm.GradientBuckets(comm, parameters, compression=ErrorFeedback("bf16"))
        for name, gradient in backward():
            buckets.ready(name, gradient)
        means = buckets.wait()

    Gradients are packed into registered memory in the order of `parameters`; give them in the order
    in which gradients become ready, the last layer first. A bucket is reduced in the background
    once all of its gradients are ready and the buckets before it have started, so the order is the
    same on all ranks, whatever becomes ready when. Works in flight make progress in each call of
    `ready`.

    Parameters
    ----------
    comm : Communicator
        Whose ranks. It may be used for other calls between the steps, the same on all ranks.
    parameters : mapping of str to array
        Name, shape and dtype of each gradient, equal on all ranks. The values do not count.
    bucket_bytes : int
        Bytes at which a bucket is full. Longer arrays have one to themselves.
    op : str or ReduceOp
        ``"avg"`` or another operation of all_reduce.
    compression : str or Codec, optional
        As of all_reduce. Error feedback keeps residuals under a key for each bucket. Buckets of
        other types than float32 are not compressed.
    exempt : callable, optional
        ``exempt(name, array) -> bool``: which parameters are not compressed, for instance
        ``lambda name, x: x.ndim < 2``. They get buckets of their own.
    timeout : float, optional
        Deadline of each reduction in seconds; by default that of the communicator.
    name : str, optional
        The beginning of those keys. By default "gradients", with a number from the second set of
        buckets on that is made with one `ErrorFeedback`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If these cannot be reduced so.
    MismatchError
        If the ranks do not give the same.
    """

    def __init__(
        self,
        comm: "Communicator",
        parameters: Mapping[str, Any],
        *,
        bucket_bytes: int = 4 << 20,
        op: Any = "avg",
        compression: Any = None,
        exempt: Callable[[str, Any], bool] | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
            raise ArgumentTypeError(f"bucket_bytes is a number of bytes, not {bucket_bytes!r}")
        if bucket_bytes < 1:
            raise ArgumentValueError(f"bucket_bytes={bucket_bytes} is not positive")
        if not isinstance(parameters, Mapping):
            raise ArgumentTypeError(
                f"parameters map names to arrays, {type(parameters).__name__} does not"
            )
        self._comm, self._op, self._timeout = comm, op, timeout
        self._compression, self._limit = as_codec(compression), bucket_bytes
        self._kinds: dict[str, tuple[tuple[int, ...], Any, bool]] = {}
        for one, like in parameters.items():
            if not isinstance(one, str):
                raise ArgumentTypeError(f"the name of a parameter is a string, not {one!r}")
            array = _as_array(like, f"parameter {one!r}")
            dtype = as_dtype(array.dtype)
            plain = exempt is not None and bool(exempt(one, array))
            compressed = self._compression is not None and dtype.name == "float32" and not plain
            self._kinds[one] = array.shape, dtype.numpy, compressed
            reduce_op(op, as_buffer(np.empty(0, dtype.numpy)))  # raises if it cannot be
        if self._compression is not None and as_op(op) not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ArgumentValueError(f"compression is for sum and avg, not for {op}")
        codec = self._compression
        how = None if codec is None else name_of(codec)
        said = (self._kinds, bucket_bytes, str(op), how, name)
        told = comm.all_gather_object(zlib.crc32(repr(said).encode()))
        if len(set(told)) > 1:
            raise MismatchError(
                "GradientBuckets: the ranks disagree about names, shapes, dtypes, their order, or "
                "options"
            )
        self._name = "gradients" if name is None else name
        if name is None and isinstance(codec, ErrorFeedback):
            # Sets that share it must not share residuals; ranks make them in the same order.
            served = _served[codec] = _served.get(codec, 0) + 1
            self._name += f" {served}" if served > 1 else ""
        self._last = list(self._kinds)  # in the order in which they became ready
        self._build(self._last)

    def _build(self, order: list[str]) -> None:
        """Form buckets of the gradients in that order."""
        filling: dict[tuple[Any, bool], list[str]] = {}
        full: list[list[str]] = []
        for name in order:
            kind = self._kinds[name][1:]
            names = filling.setdefault(kind, [])
            if names and sum(map(self._nbytes, (*names, name))) > self._limit:
                full.append(names)
                names = filling[kind] = []
            names.append(name)
        self._buckets: list[_Bucket] = []
        self._views: dict[str, Array] = {}
        self._bucket_of: dict[str, _Bucket] = {}
        for number, names in enumerate([*full, *filling.values()]):
            _, dtype, compressed = self._kinds[names[0]]
            flat = self._comm.empty(sum(map(self._count, names)), dtype)
            key = f"{self._name} {number}"
            bucket = _Bucket(flat, names, compressed, key, set(names))
            start = 0
            for name in names:
                stop = start + self._count(name)
                self._views[name] = flat[start:stop].reshape(self._kinds[name][0])
                self._bucket_of[name] = bucket
                start = stop
            self._buckets.append(bucket)
        self._started = 0  # buckets, in this step
        self._seen: list[str] = []

    def _count(self, name: str) -> int:
        return int(np.prod(self._kinds[name][0], dtype=np.int64))

    def _nbytes(self, name: str) -> int:
        return self._count(name) * int(self._kinds[name][1].itemsize)

    def __getitem__(self, name: str) -> Array:
        """Return the memory of a gradient in its bucket: write it here, and `ready` need not copy.

        After `wait` it holds the result, until it is written again.
        """
        try:
            return self._views[name]
        except (KeyError, TypeError):
            raise ArgumentValueError(f"no parameter {name!r}") from None

    def ready(self, name: str, gradient: Any = None) -> None:
        """Hand in a gradient, once in a step; start what can start, and make progress.

        Parameters
        ----------
        name : str
            Which one.
        gradient : array, optional
            Its value, copied into the bucket; None if it has been written there, see `[]`.

        Raises
        ------
        ArgumentValueError
            If there is no such parameter, if it has been handed in already, or if shape or dtype
            are not those of the parameter.
        CommError
            If a reduction failed.
        """
        view = self[name]
        bucket = self._bucket_of[name]
        if name not in bucket.missing:
            raise ArgumentValueError(f"{name!r} was ready before; wait() ends a step")
        if gradient is not None:
            array = _as_array(gradient, repr(name))
            if array.shape != view.shape or array.dtype != view.dtype:
                raise ArgumentValueError(
                    f"{name!r} is {view.dtype} of shape {view.shape}, "
                    f"not {array.dtype} of shape {array.shape}"
                )
            if array is not view:
                view[...] = array
        bucket.missing.remove(name)
        self._seen.append(name)
        self._start()
        for other in self._buckets[: self._started]:
            if other.work is not None:
                other.work.done()

    def _start(self) -> None:
        """Start the buckets that are full, in their order, up to the first that is not."""
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if bucket.missing:
                return
            bucket.work = self._comm.all_reduce(
                bucket.flat, op=self._op, timeout=self._timeout, async_op=True,
                compression=self._compression if bucket.compressed else None, key=bucket.key,
            )  # fmt: skip
            self._started += 1

    def wait(self, timeout: float | None = None) -> dict[str, Array]:
        """End the step: wait for all buckets and return the results by name.

        They are in the buckets' memory, and change when the next gradients are handed in.

        Parameters
        ----------
        timeout : float, optional
            Seconds for each bucket; by default what is left of its own deadline.

        Raises
        ------
        ArgumentValueError
            If gradients are missing; hand in zeros for a parameter that was not used.
        CommError
            If a reduction failed.
        """
        missing = [name for name, bucket in self._bucket_of.items() if name in bucket.missing]
        if missing:
            raise ArgumentValueError(
                f"not ready: {', '.join(missing)}; every gradient takes part in every step"
            )
        self._start()  # what failed to start raises again
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait(timeout)
        for bucket in self._buckets:
            bucket.work = None
            bucket.missing = set(bucket.names)
        self._started = 0
        self._last, self._seen = self._seen, []
        return dict(self._views)

    def reorder(self) -> None:
        """Form the buckets anew, in the order in which rank 0's gradients became ready last time.

        Collective, between two steps. Arrays that `[]` and `wait` have returned before are of no
        use afterwards, and error feedback starts anew.
        """
        if self._seen:
            raise ArgumentValueError("reorder() is for the time between two steps: wait() first")
        order: list[str] = self._comm.broadcast_object(self._last)
        if isinstance(self._compression, ErrorFeedback):
            for bucket in self._buckets:
                self._compression.reset(bucket.key)
        self._build(order)
