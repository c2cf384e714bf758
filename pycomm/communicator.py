"""The communicator: a group of ranks and the operations between them."""

import logging
import math
import operator
import os
import warnings
import weakref
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from pycomm.arguments import as_ordinal, rank_of
from pycomm.bootstrap.leaving import watch
from pycomm.buffers import Buffer
from pycomm.call import Call
from pycomm.checking import as_check
from pycomm.choice import overrides
from pycomm.deadline import DEFAULT, Deadline, as_timeout
from pycomm.dtypes import DTYPES, as_dtype
from pycomm.engine import Engine
from pycomm.errors import ArgumentTypeError, ArgumentValueError, CommError, MismatchError
from pycomm.meeting import meeting
from pycomm.messages import Messages
from pycomm.movement import Movement
from pycomm.planner import Planning
from pycomm.reductions import Reductions
from pycomm.transports.base import Transport, await_transport
from pycomm.transports.shared import REGIONS
from pycomm.tuning import find

if TYPE_CHECKING:
    from pycomm.device.side import DeviceSide

__all__ = ["Communicator"]

_log = logging.getLogger("pycomm")


class Communicator(Reductions, Movement, Messages, Planning):
    """A group of ranks that exchange arrays.

    Made by `pycomm.init`, `pycomm.run_local`, `Communicator.from_mpi`, and by the split methods.
    All collectives must be called by all ranks of the communicator in the same order. Ranks are
    always ranks in this communicator. A communicator serves one thread at a time.

    Arrays are C-contiguous host arrays of any kind with the buffer protocol,
    ``__array_interface__`` or DLPack. They are joined and split along axis 0. The order is (in,
    out); without `out`, reductions and broadcast work in place and return `x`, the others return a
    new array of the kind of `x`. These parameters mean the same everywhere:

    timeout : float, optional
        Seconds until `CommTimeoutError`; the communicator's own by default. After that error the
        communicator is broken: only `abort` is possible.
    algorithm : str
        ``"auto"``, ``"native"`` (the library's own, or an error), or the name of an algorithm that
        `pycomm.algorithms.names` lists for the collective, such as ``"ring"``. Equal on all ranks.
    deterministic : bool
        Of collectives that reduce: whether floats are added in a fixed order only, so that equal
        inputs give equal bits in every run; the communicator's own setting by default.
    async_op : bool
        Return a `Work` at once instead of waiting. Input and output must not be touched until the
        work is done.

    Wrong arguments raise `ArgumentTypeError` or `ArgumentValueError` on the calling rank before
    anything is sent. Failures between ranks raise `CommError`.
    """

    _wanted: int | None = None

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._host: Communicator | None = None
        self._children: list[Communicator] = []
        self._splits = 0
        # Weak: the engine is not to keep alive what warns when it is dropped.
        engine.make_device = weakref.WeakMethod(self._make_device)
        watch(self)

    @classmethod
    def over(
        cls,
        transport: Transport,
        *,
        timeout: float,
        check: bool,
        deterministic: bool = False,
        label: str = "world",
        device: int | None = None,
    ) -> Self:
        """Return a communicator over a transport of one's own."""
        comm = cls(Engine(transport, timeout, check, label, [], deterministic))
        comm._wanted = device
        return comm

    @classmethod
    def from_mpi(
        cls,
        comm: Any,
        *,
        timeout: float | None = None,
        check: bool | None = None,
        deterministic: bool = False,
    ) -> Self:
        """Return a communicator over the ranks of an mpi4py communicator.

        Collective over `comm`, which stays the caller's: pycomm works on duplicates of it.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            The ranks.
        timeout : float, optional
            Seconds each operation may take by default, and this one; 300 if not given.
        check : bool, optional
            Compare the calls of all ranks before each collective; see `pycomm.init`.
        deterministic : bool
            Reduce floats in a fixed order only; see `pycomm.init`.
        """
        from pycomm.bootstrap.mpi import mpi_transport

        allowed = as_timeout(timeout, DEFAULT)
        transport = mpi_transport(comm, allowed)
        return cls.over(
            transport,
            timeout=allowed,
            check=as_check(check),
            deterministic=deterministic,
            label="from_mpi",
        ).tuned()

    @classmethod
    def from_unique_id(
        cls,
        unique_id: bytes,
        rank: int,
        size: int,
        device: int | None = None,
        *,
        timeout: float | None = None,
        check: bool | None = None,
        deterministic: bool = False,
    ) -> Self:
        """Return a communicator over NCCL alone, for ranks that meet by means of their own.

        Collective over them. Host arrays and objects go through device memory, for want of another
        road: fine for what is said now and then.

        Parameters
        ----------
        unique_id : bytes
            What `pycomm.get_unique_id` returned on one of the ranks, or on nobody's behalf.
        rank, size : int
            The rank of this process, and the number of ranks.
        device : int, optional
            The number of its device among those that this process sees. By default the current one
            of this thread, or else the rank modulo the devices.
        timeout : float, optional
            Seconds each operation may take by default, and this one; 300 if not given.
        check, deterministic
            See `pycomm.init`.

        Raises
        ------
        CommTimeoutError
            If not all ranks come in time.
        NCCLError
            If NCCL cannot connect them: two ranks on one device, for instance.
        """
        from pycomm.device.staged import StagedTransport
        from pycomm.devices import current_device, device_count, get_device

        allowed = as_timeout(timeout, DEFAULT)
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ArgumentTypeError(f"size is a number of ranks, not {type(size).__name__}")
        if size < 1:
            raise ArgumentValueError(f"size is a number of ranks, not {size}")
        size = int(size)
        rank = rank_of(rank, size, "rank")
        device = as_ordinal(device)
        if device is None:
            device = current_device()
            device = rank % max(device_count(), 1) if device is None else device
        label = "from_unique_id"
        transport = StagedTransport.create(
            unique_id, rank, size, get_device(device), Deadline(allowed), label
        )
        comm = cls.over(
            transport,
            timeout=allowed,
            check=as_check(check),
            deterministic=deterministic,
            label=label,
            device=device,
        )
        comm._over_nccl(transport)
        return comm.tuned()

    def tuned(self) -> Self:
        """Adopt on all ranks what rank 0 reads: measurements of this machine, and its environment.

        Raises
        ------
        ArgumentValueError
            On all ranks, if ``PYCOMM_TUNING`` names a file that cannot be used, or
            ``PYCOMM_ALGORITHM`` no algorithm.
        """
        found: tuple[str | None, Any] = (None, None)
        if self._rank == 0:
            try:
                chosen = overrides(os.environ)
                tuning, problem = find(os.environ, self._engine.transport.library)
                found = (None, (tuning, chosen))
                if problem is not None:
                    _log.warning("not tuned: %s", problem)
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                found = (str(error) or type(error).__name__, None)
        failure, adopted = self.broadcast_object(found)
        if failure is not None:
            refused = ArgumentValueError(failure)
            self.leave(refused)
            raise refused
        self._engine.adopt(*adopted)
        self._engine.sequence = 0  # what users count begins with their first call
        return self

    def empty(self, shape: Any, dtype: Any = "float32", *, device: str = "host") -> Any:
        """Return a registered array: memory that the ranks of this host, or NCCL, can map.

        On the host: no communication. Collectives between ranks of one host go straight through
        such memory, and through contiguous views of it. It is freed with the last view of it; that
        of a peer lives as long as the peer's array. Where the system cannot share memory without a
        name (memfd), this is an ordinary array.

        On a device: collective over all ranks, with equal sizes. Memory of NCCL's, registered as a
        window, that its fastest algorithms need; it is freed with the communicator.

        Parameters
        ----------
        shape : int or tuple of int
            Its shape. The values are zeros.
        dtype : str or numpy.dtype
            Its element type, one that `pycomm` knows.
        device : str
            ``"host"``, or ``"cuda"`` for the device that this communicator works on.

        Returns
        -------
        numpy.ndarray or DeviceArray
            A new C-contiguous array.

        Raises
        ------
        MemoryError
            If there is less memory than that, with the numbers, before any of it is used; or if
            no file descriptor is left: an array above 64 KiB takes one.
        ArgumentTypeError, ArgumentValueError
            If there is no such dtype or shape.
        """
        row = as_dtype(dtype)
        kind = row.numpy
        if device not in ("host", "cuda"):
            raise ArgumentValueError(f"device is 'host' or 'cuda', not {device!r}")
        try:
            sizes = (
                (operator.index(shape),)
                if not isinstance(shape, Iterable)
                else tuple(operator.index(length) for length in shape)
            )
        except TypeError:
            raise ArgumentTypeError(f"a shape is whole numbers, not {shape!r}") from None
        if any(length < 0 for length in sizes):
            raise ArgumentValueError(f"a shape has no negative lengths: {shape!r}")
        nbytes = math.prod(sizes) * kind.itemsize
        if device == "cuda":
            return self._side.empty(sizes, row, nbytes)
        try:
            octets = REGIONS.allocate(nbytes)
        except OSError:
            octets = np.zeros(nbytes, np.uint8)
        try:
            return octets.view(kind).reshape(sizes)
        except ValueError as error:  # too many dimensions, or too long ones beside an empty one
            raise ArgumentValueError(f"no array has the shape {shape!r}: {error}") from None

    zeros = empty

    def _make_device(self) -> "DeviceSide":
        from pycomm.device.side import DeviceSide  # only now: it loads what belongs to CUDA

        local = (self.local_rank, self.local_size)
        own = weakref.WeakMethod(self.all_gather_object)

        def gather(told: Any, seconds: float) -> list[Any]:
            method = own()
            assert method is not None
            return method(told, timeout=seconds)

        return DeviceSide(self._engine, gather, self._wanted, local)

    @property
    def _side(self) -> "DeviceSide":
        return cast("DeviceSide", self._engine.on_device())

    def group(self) -> AbstractContextManager[None]:
        """Return a ``with`` scope whose calls on device arrays NCCL starts together, at its end.

        What several sends and receives between the same ranks need, and what saves launches. Only
        what NCCL does itself belongs there; the results are there after its end.
        """
        return self._side.group()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far in collectives, as messages of its own.

        What the library underneath sends in its own collectives is not known.
        """
        return self._engine.transport.bytes_sent

    @property
    def saturated(self) -> int:
        """How many finite values were too large for the codecs of this rank's calls so far."""
        side = self._engine.device
        return self._engine.choices.saturated + (0 if side is None else side.saturated)

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks of its host, in rank order; no communication."""
        return self._host_ranks.index(self._rank)

    @property
    def local_size(self) -> int:
        """The number of ranks on this host; no communication."""
        return len(self._host_ranks)

    @property
    def _host_ranks(self) -> list[int]:
        hosts = self._engine.transport.hosts
        return [rank for rank in range(self._size) if hosts[rank] == hosts[self._rank]]

    @property
    def host(self) -> "Communicator":
        """The communicator of the ranks of this host, in rank order.

        Collective over those ranks on first use. It belongs to this communicator and is closed
        with it.
        """
        if self._host is None:
            self._host = self.split_ranks(self._host_ranks)
            assert self._host is not None
        return self._host

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> "Communicator | None":
        """Split into communicators of the ranks with equal `color`; collective over all ranks.

        Parameters
        ----------
        color : int or None
            Which group to join; None for no group.
        key : int
            Ranks are numbered by key, equal keys by their rank here.

        Returns
        -------
        Communicator or None
            The new one, closed with this one; None without a color.
        """
        _check_number(key, "key")
        if color is not None:
            _check_number(color, "color")
        own = np.array([color is not None, color or 0, key], np.int64)
        table = np.empty((self._size, 3), np.int64)
        row = DTYPES["int64"]
        call = Call(
            "all_gather", Buffer(own, row, own), Buffer(table, row, table), None, row, 3,
            operation="split",
        )  # fmt: skip
        self._engine.run(call, "auto", timeout, False)
        if color is None:
            return None
        same = [r for r in range(self._size) if table[r, 0] and table[r, 1] == color]
        return self._new_group(sorted(same, key=lambda r: (table[r, 2], r)), timeout)

    def split_ranks(
        self, ranks: Iterable[int], *, timeout: float | None = None
    ) -> "Communicator | None":
        """Return a communicator of `ranks`, numbered in that order; collective over those only.

        Parameters
        ----------
        ranks : iterable of int
            Ranks of this communicator, without repetition, the same on each of them.

        Returns
        -------
        Communicator or None
            The new one, closed with this one; None, at once, on a rank that is not in `ranks`.

        Raises
        ------
        MismatchError
            If the members give `ranks` in different orders. Other lists than theirs end with
            `CommTimeoutError` on those that wait for a rank that does not come.
        """
        if not isinstance(ranks, Iterable):
            raise ArgumentTypeError(f"ranks are several, not {type(ranks).__name__}")
        members = [rank_of(rank, self._size, "ranks") for rank in ranks]
        if len(set(members)) != len(members) or not members:
            raise ArgumentValueError(f"ranks must be distinct and not empty, not {members}")
        return self._new_group(members, timeout) if self._rank in members else None

    def _new_group(self, members: list[int], timeout: float | None) -> "Communicator":
        """Meet the members, under a deadline, and make their communicator."""
        engine = self._engine
        deadline = Deadline(as_timeout(timeout, engine.timeout))
        span = np.full(2, zlib.crc32(repr(members).encode()), np.uint64)
        # Twice: who passes the second time knows that all have passed the first, and that nobody
        # had given up before. Only then may MPI make the group, which no deadline can stop.
        for _ in range(2):
            steps = meeting(engine.transport, members, engine.meeting_tag, span)
            engine.meet(steps, "split", timeout)
        if span[0] != span[1]:
            raise MismatchError(
                f"split_ranks on rank {self._rank}: the ranks do not all give the same list; here "
                f"it is {members}",
                operation="split_ranks",
                rank=self._rank,
            )
        try:
            transport = await_transport(engine.transport.split(members), deadline, "split")
        except BaseException as error:
            raise engine.fail(error, "split", None) from error.__cause__
        return self._child(transport)

    def _over_nccl(self, transport: Any) -> None:
        """Take over the NCCL communicator of a transport that is nothing else."""
        comm = getattr(transport, "comm", None)
        if comm is None:
            return
        from pycomm.device.together import check_outside

        self._engine.guard = partial(check_outside, None)
        try:
            self._side.use(comm)
        except BaseException:
            comm.abort()
            raise

    def _child(self, transport: Any) -> "Communicator":
        """Return the communicator over a transport that came out of this one."""
        engine = self._engine
        self._splits += 1
        family, label = engine.waiter.family, f"{engine.label}/{self._splits}"
        child = Communicator(
            Engine(transport, engine.timeout, engine.check, label, family, engine.deterministic)
        )
        child._engine.adopt(engine.tuning, engine.choices.overrides)
        child._wanted = self._wanted
        child._over_nccl(transport)
        self._children = [one for one in self._children if one._engine.state == "open"]
        self._children.append(child)
        return child

    def shrink(
        self, exclude: Iterable[int] = (), *, timeout: float | None = None
    ) -> "Communicator":
        """Return a communicator of the ranks that are left; collective over those only.

        Also of a communicator that is broken by what went wrong on devices, or whose ranks have
        NCCL only. What was under way there is given up; abort the old one when it is not needed
        any more. A communicator whose messages between hosts have broken down cannot be shrunk.

        Parameters
        ----------
        exclude : iterable of int
            The ranks that do not come, the same on all that do.

        Raises
        ------
        UnsupportedError
            Of ranks with NCCL only, if it is older than 2.27.
        CommTimeoutError
            If not all others come in time.
        """
        engine = self._engine
        if not isinstance(exclude, Iterable):
            raise ArgumentTypeError(f"exclude are several ranks, not {type(exclude).__name__}")
        gone = sorted({rank_of(rank, self._size, "exclude") for rank in exclude})
        if self._rank in gone:
            raise ArgumentValueError(f"this is rank {self._rank}, which is among {gone}")
        if engine.state not in ("open", "broken"):
            raise CommError(f"shrink: {engine.label} is {engine.state}", operation="shrink")
        shrink = getattr(engine.transport, "shrink", None)
        if shrink is not None:
            deadline = Deadline(as_timeout(timeout, engine.timeout))
            self._side.give_up(CommError(f"{engine.label} was shrunk", rank=self._rank))
            transport = shrink(gone, deadline, f"{engine.label}/shrunk")
            if engine.state == "open":
                engine.break_off(CommError("it was shrunk"), "shrink")
            return self._child(transport)
        members = [rank for rank in range(self._size) if rank not in gone]
        return self._new_group(members, timeout)

    # --------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Finish what was started, meet the other ranks, and free everything; idempotent.

        Collective. Communicators split from this one are closed first. A broken communicator is
        aborted instead.
        """
        try:
            for child in self._children:
                child.close()
            self._engine.close()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up at once, without talking to any peer; idempotent."""
        for child in self._children:
            child.abort()
        self._engine.abort()

    def leave(self, reason: BaseException) -> None:
        """Tell the peers that this rank leaves because of `reason`, then abort.

        Those who wait for this rank, now or later, raise `PeerError` at once instead of after
        their deadline. The context manager does this when an exception passes through it.
        """
        self._engine.leave(reason)
        for child in self._children:
            child.leave(reason)

    def lose(self, why: str) -> None:
        """Refuse all further use because `why`, without a word to anybody."""
        self._engine.lose(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.leave(error)

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None and engine.state == "open" and "/" not in engine.label:
            warnings.warn(
                "a pycomm communicator was dropped without close(); use it in a with statement",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        engine = self._engine
        return (
            f"<pycomm.Communicator {engine.label}: rank {self._rank} of {self._size}, "
            f"{engine.state}>"
        )

    # Names that MPI and NCCL users know.
    allreduce = Reductions.all_reduce
    reducescatter = Reductions.reduce_scatter
    allgather = Movement.all_gather
    alltoall = Movement.all_to_all
    bcast = Movement.broadcast


def _check_number(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentTypeError(f"{name} is an int, not {type(value).__name__}")
    if not -(2**63) <= int(value) < 2**63:
        raise ArgumentValueError(f"{name}={value} does not fit in 64 bits")
