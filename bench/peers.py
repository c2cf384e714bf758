"""Other libraries doing the same call, to be measured in turn with pycomm.

A peer gets the same arrays as pycomm and is called the way its users call it. Where it has no such
call (no in-place form, no such element type or operation) it is left out: `Peer.bind` returns None,
or the call raises when it is tried, on all ranks alike and before anything is sent.
"""

import importlib.util
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pycomm.bench.cases import Case, Placement

if TYPE_CHECKING:
    from pycomm import Communicator

__all__ = ["Gloo", "Mpi4py", "Peer", "open_peer", "why_not"]

Array = NDArray[Any]
Call = Callable[..., Any]


class Peer(Protocol):
    """Another library."""

    name: str
    version: str

    def bind(
        self, case: Case, placement: Placement, *, op: str | None, root: int, in_place: bool
    ) -> Call | None:
        """Return the counterpart of pycomm's call on the same arrays, None if there is none."""

    def close(self) -> None:
        """Give back what was opened."""


def why_not(name: str, comm: "Communicator") -> str | None:
    """Return why the peer cannot be measured on this rank, None if it can; nothing is sent."""
    if name == "gloo":
        if importlib.util.find_spec("torch") is None:
            return "--compare gloo needs PyTorch: pip install torch"
        return None
    if importlib.util.find_spec("mpi4py") is None:
        return "--compare mpi4py needs mpi4py: pip install 'pycomm-collectives[mpi]'"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (comm.rank, comm.size):
        return (
            f"--compare mpi4py needs the ranks of MPI_COMM_WORLD: this is rank {world.rank} of "
            f"{world.size} there, {comm.rank} of {comm.size} in pycomm; start the job with mpirun"
        )
    return None


def open_peer(name: str, comm: "Communicator") -> Peer:
    """Return the peer of that name, on all ranks together."""
    return Gloo(comm) if name == "gloo" else Mpi4py()


class Mpi4py:
    """The upper-case calls of mpi4py on ``MPI.COMM_WORLD``, all of them blocking."""

    name = "mpi4py"

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
        self.version = f"{mpi4py.__version__} ({library})"

    def bind(
        self, case: Case, placement: Placement, *, op: str | None, root: int, in_place: bool
    ) -> Call | None:
        """Return the counterpart of pycomm's call on the same arrays, None if there is none."""
        world, keep = self._world, self._mpi.IN_PLACE
        if case.name == "barrier":
            return world.Barrier
        arrays = [array for array in (placement.x, placement.out) if array is not None]
        x, out = placement.x, placement.out
        if not self._knows(arrays[0].dtype):
            if case.reduces:
                return None
            x, out = _as_bytes(x), _as_bytes(out)
        if case.reduces:
            function = self._op(arrays[0].dtype, op)
            if function is None:
                return None
            return self._reduction(case, x, out, function, root, in_place)
        if case.name == "broadcast":
            return partial(world.Bcast, x, root=root) if in_place else None
        if case.name == "send_recv":
            right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            return partial(world.Sendrecv, x, right, recvbuf=out, source=left)
        if case.name == "gather":
            here = in_place and world.rank == root
            return partial(world.Gather, keep if here else x, out, root=root)
        if case.name == "scatter":
            here = in_place and world.rank == root
            return partial(world.Scatter, x, keep if here else out, root=root)
        method = world.Allgather if case.name == "all_gather" else world.Alltoall
        return partial(method, keep if in_place else x, out)

    def _reduction(self, case: Case, x: Any, out: Any, op: Any, root: int, in_place: bool) -> Call:
        world = self._world
        source, target = (self._mpi.IN_PLACE, x) if in_place else (x, out)
        if case.name == "reduce_scatter":
            # In place MPI takes the whole input and leaves the result at its start.
            return partial(world.Reduce_scatter_block, source, target, op=op)
        if case.name == "all_reduce":
            return partial(world.Allreduce, source, target, op=op)
        if world.rank != root:
            return partial(world.Reduce, x, None, op=op, root=root)
        return partial(world.Reduce, source, target, op=op, root=root)

    def _knows(self, dtype: np.dtype[Any]) -> bool:
        # The types of ml_dtypes have codes of their own, none of them one of MPI's.
        if dtype.isbuiltin != 1:
            return False
        try:
            self._mpi.Datatype.fromcode(dtype.char)
        except ValueError:
            return False
        return True

    def _op(self, dtype: np.dtype[Any], op: str | None) -> Any:
        mpi = self._mpi
        if dtype.kind == "b":
            return {"sum": mpi.LOR, "max": mpi.LOR, "prod": mpi.LAND, "min": mpi.LAND}.get(str(op))
        return {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}.get(str(op))

    def close(self) -> None:
        """Leave MPI running: pycomm uses it too."""


def _as_bytes(array: Array | None) -> Array | None:
    return None if array is None else array.view(np.uint8)


class Gloo:
    """`torch.distributed` with the gloo backend, on tensors that share memory with the arrays."""

    name = "gloo"

    def __init__(self, comm: "Communicator") -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._rank, self._size = comm.rank, comm.size
        self.version = str(torch.__version__)
        # Later versions of torch have these under other names.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )
        names = comm.all_gather_object(socket.gethostname())
        master = "127.0.0.1" if len(set(names)) == 1 else names[0]
        store: Any = None
        answer: tuple[int, str] = (0, "")
        if comm.rank == 0:
            try:
                store = dist.TCPStore(master, 0, comm.size, True, wait_for_workers=False)
                answer = (store.port, "")
            except Exception as error:
                answer = (0, str(error))
        port, problem = comm.broadcast_object(answer)
        if not port:
            raise RuntimeError(f"gloo: rank 0 could not open its store on {master}: {problem}")
        if store is None:
            store = dist.TCPStore(master, port, comm.size, False)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def bind(
        self, case: Case, placement: Placement, *, op: str | None, root: int, in_place: bool
    ) -> Call | None:
        """Return the counterpart of pycomm's call on the same arrays, None if there is none."""
        dist = self._dist
        if case.name == "barrier":
            return partial(dist.barrier)
        arrays = (placement.x, placement.out)
        if not case.reduces:
            # What is only moved may be bytes: torch and gloo do not know all types.
            arrays = (_as_bytes(placement.x), _as_bytes(placement.out))
        try:
            x, out = map(self._tensor, arrays)
        except TypeError:
            return None
        if case.reduces:
            names = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
            if op not in names:
                return None
            function = getattr(dist.ReduceOp, names[op])
            if case.name == "reduce_scatter":
                return partial(self._reduce_scatter, out, x, op=function)
            if not in_place:
                return None
            if case.name == "reduce":
                return partial(dist.reduce, x, dst=root, op=function)
            return partial(dist.all_reduce, x, op=function)
        if case.name == "broadcast":
            return partial(dist.broadcast, x, src=root) if in_place else None
        if case.name == "all_gather":
            return partial(self._all_gather, out, x)
        if case.name == "gather":
            return partial(dist.gather, x, self._parts(out), dst=root)
        if case.name == "scatter":
            return partial(dist.scatter, out, self._parts(x), src=root)
        if case.name == "all_to_all":
            return None if in_place else partial(dist.all_to_all_single, out, x)
        return partial(self._send_recv, x, out)

    def _send_recv(self, x: Any, out: Any) -> None:
        sending = self._dist.isend(x, (self._rank + 1) % self._size)
        self._dist.recv(out, (self._rank - 1) % self._size)
        sending.wait()

    def _parts(self, tensor: Any) -> Any:
        return None if tensor is None else list(tensor.tensor_split(self._size))

    def _tensor(self, array: Array | None) -> Any:
        if array is None:
            return None
        if array.dtype.isbuiltin == 1:
            return self._torch.from_numpy(array)
        # NumPy's additional types have the same names in torch, but only bytes can be handed over.
        kind = getattr(self._torch, array.dtype.name, None)
        if kind is None:
            raise TypeError(f"torch has no {array.dtype.name}")
        return self._torch.from_numpy(array.view(np.uint8)).view(kind)

    def close(self) -> None:
        """Leave the process group."""
        self._dist.destroy_process_group()
