"""The communicator: a group of ranks and the operations between them."""

import logging
import os
import warnings
from types import TracebackType
from typing import Any, Self

import numpy as np

from pycomm.arguments import as_ordinal, rank_of
from pycomm.bootstrap.leaving import watch
from pycomm.checking import as_check
from pycomm.choice import overrides
from pycomm.deadline import DEFAULT, Deadline, as_timeout
from pycomm.engine import Engine
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.groups import Groups
from pycomm.movement import Movement
from pycomm.planner import Planning
from pycomm.reductions import Reductions
from pycomm.transports.base import Transport
from pycomm.tuning import find

__all__ = ["Communicator"]

_log = logging.getLogger("pycomm")


class Communicator(Reductions, Movement, Planning, Groups):
    """A group of ranks that exchange arrays.

    Made by `pycomm.init`, `pycomm.run_local`, `Communicator.from_mpi`,
    `Communicator.from_unique_id`, and by the split methods.
    All collectives must be called by all ranks of the communicator in the same order. Ranks are
    always ranks in this communicator. A communicator serves one thread at a time.

    Arrays are C-contiguous: host arrays of any kind with the buffer protocol,
    ``__array_interface__`` or DLPack, or arrays on a CUDA device with ``__cuda_array_interface__``
    or DLPack, for which a call returns once it has been given to a stream. They are joined and
    split along axis 0. The order is (in, out); without `out`, reductions and broadcast work in
    place and return `x`, the others return a new array of the kind of `x`. These
    parameters mean the same everywhere:

    stream : Stream, int or object, optional
        Of device arrays: the stream that gets the call, see the guide; by default that which the
        arrays name, or which their library is using.
    timeout : float, optional
        Seconds until `CommTimeoutError`; the communicator's own by default. After that error the
        communicator is broken: only `abort` is possible, and `shrink` if only its devices are.
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

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
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

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far in collectives, as messages of its own.

        What the library underneath sends in its own collectives is not known.
        """
        return self._engine.transport.bytes_sent

    # --------------------------------------------------------------------------- life cycle

    @property
    def closed(self) -> bool:
        """Whether it was closed, as one that is of no use any more; a broken one is not."""
        return self._engine.state == "closed"

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
