"""Host arrays over NCCL, through device memory: for ranks that have no other road.

A communicator made from a unique id has NCCL and nothing else. Its host arrays are copied to the
device, go with NCCL, and come back: right for what a program tells its ranks now and then, not for
what it computes with.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
from pycomm.call import Call
from pycomm.deadline import Deadline
from pycomm.device.native import bind_native, is_native, unfit
from pycomm.device.together import send_receive
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.device_buffers import DeviceBuffer
from pycomm.devices import Device
from pycomm.dtypes import DTYPES, DType, Op
from pycomm.errors import ArgumentValueError, CommError
from pycomm.streams import Event, Stream
from pycomm.transports.base import Array, Native, Pending, Tested, await_transport
from pycomm.transports.joining import Making, begin, create, shrink, split, unique_id
from pycomm.transports.nccl import NCCLComm

__all__ = ["StagedTransport"]

_UINT8 = DTYPES["uint8"]
_SMALLEST = 1 << 12
_ALIGNMENT = 256
_QUICK_LOOKS = 200
_PAUSE = 5e-5  # seconds between looks
#: Seconds that NCCL may take to accept a message, at most.
_ACCEPT = 60.0


class _Staged:
    """The `Pending` of something that is on its way through device memory."""

    def __init__(
        self,
        transport: "StagedTransport",
        event: Event,
        block: DeviceArray,
        back: list[tuple[Array, int]],
        held: object,
    ) -> None:
        self._transport, self._event, self._block = transport, event, block
        self._back: list[tuple[Array, int]] | None = back
        self._held = held

    def test(self) -> bool:
        if self._back is None:
            return True
        comm = self._transport.comm
        if comm.error is not None:
            raise comm.error
        if not self._event.done():
            return False
        error = comm.look()
        if error is not None:  # the stream went on, but without the data
            raise error
        # On the own stream, which returns once the data is there: the legacy default stream would
        # wait for whatever the caller has given to others.
        stream = self._transport.stream
        with comm.device.entered():
            for array, address in self._back:
                if array.nbytes:
                    place = array.ctypes.data
                    code = cuda.cuMemcpyDtoHAsync_v2(place, address, array.nbytes, stream)
                    cuda.check(code, "cuMemcpyDtoHAsync")
        self._back = self._held = None
        self._transport.give(self._block)
        return True


class _Message:
    """The `Pending` of a message of the user's; it goes with others, once one is awaited."""

    def __init__(self, transport: "StagedTransport") -> None:
        self._transport = transport
        self.sent: Pending | None = None

    def test(self) -> bool:
        if self.sent is None:
            self._transport.flush()
        assert self.sent is not None
        return self.sent.test()


class _Split:
    """A transport in the making."""

    def __init__(self, parent: "StagedTransport", ranks: tuple[int, ...]) -> None:
        self._parent, self._ranks = parent, ranks
        self._token = np.zeros(128, np.uint8)
        rank = ranks.index(parent.rank)
        sends, receives = [], []
        if rank == 0:
            self._token[:] = np.frombuffer(unique_id(), np.uint8)
            sends = [(peer, self._token) for peer in ranks[1:]]
        else:
            receives = [(ranks[0], self._token)]
        self._told = parent.post(sends, receives, 0)
        self._making: Making | None = None
        self.transport: StagedTransport | None = None

    def test(self) -> bool:
        parent, ranks = self._parent, self._ranks
        if self._making is None:
            if not self._told.test():
                return False
            rank = ranks.index(parent.rank)
            self._making = begin(
                self._token.tobytes(), rank, len(ranks), parent.comm.device, "split"
            )
        if not self._making.test():
            return False
        assert self._making.comm is not None
        hosts = tuple(parent.hosts[rank] for rank in ranks)
        self.transport = StagedTransport(self._making.comm, hosts, parent.accept)
        return True

    def abandon(self) -> None:
        """Give it up."""
        if self._making is not None:
            self._making.abandon()


class StagedTransport:
    """The road of host arrays between ranks that have NCCL only.

    Attributes
    ----------
    comm : NCCLComm
        The ranks. It belongs to the device side of the communicator, which ends it.
    stream : int
        The stream that everything goes to.
    """

    crowded = False
    shares_memory = False
    tag_limit = 1 << 15

    def __init__(self, comm: NCCLComm, hosts: tuple[int, ...], timeout: float) -> None:
        self.comm = comm
        self.rank, self.size, self.hosts = comm.rank, comm.size, hosts
        self.library = f"NCCL {nccl.library.version}"
        self.bytes_sent = 0
        self._own = Stream(comm.device)
        self.stream = self._own.handle
        self.accept = min(timeout, _ACCEPT)
        self._free: dict[int, list[DeviceArray]] = {}
        self._waiting: list[tuple[_Message, int, Array, bool]] = []

    @classmethod
    def create(
        cls, token: bytes, rank: int, size: int, device: Device, deadline: Deadline, name: str
    ) -> "StagedTransport":
        """Meet the other ranks; collective. See `pycomm.transports.joining.create`."""
        comm = create(token, rank, size, device, deadline, name)
        transport = cls(comm, tuple(range(size)), deadline.timeout)
        try:
            own = np.array([_host_key()], np.uint64).view(np.uint8)
            table = np.empty(8 * size, np.uint8)
            gather = transport.native("all_gather", _UINT8, None, 8)
            assert gather is not None
            await_transport(_Told(transport, gather, own, table), deadline, "init")
            keys = table.view(np.uint64).tolist()
            transport.hosts = tuple(keys.index(key) for key in keys)
        except BaseException:
            comm.abort()
            raise
        return transport

    # ---------------------------------------------------------------------------- memory

    def _take(self, sizes: Sequence[int]) -> tuple[DeviceArray, list[int]]:
        """Return a block of device memory, and the addresses of pieces of these sizes."""
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        length = max(_SMALLEST, 1 << (total - 1).bit_length()) if total else _SMALLEST
        free = self._free.get(length)
        block = free.pop() if free else allocate(self.comm.device, (length,), _UINT8)
        return block, [block.pointer + start for start in starts]

    def give(self, block: DeviceArray) -> None:
        """Take back a block that nothing uses any more."""
        self._free.setdefault(block.size, []).append(block)

    def _copy_in(self, address: int, array: Array) -> None:
        if array.nbytes:
            code = cuda.cuMemcpyHtoDAsync_v2(address, array.ctypes.data, array.nbytes, self.stream)
            cuda.check(code, "cuMemcpyHtoDAsync")

    # ---------------------------------------------------------------------------- messages

    def post(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        tag: int,  # noqa: ARG002 - messages of a pair arrive in their order
    ) -> Pending:
        """Start one round of messages."""
        self.flush()
        return self._post(sends, recvs)

    def _post(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]]
    ) -> Pending:
        for _, data in sends:
            self.bytes_sent += data.size
        # NCCL sends nothing for nothing, and a message without bytes still has to arrive.
        sizes = [max(data.size, 1) for _, data in (*sends, *recvs)]
        block, places = self._take(sizes)
        comm, stream = self.comm, self.stream
        messages = [
            (peer, place, size)
            for (peer, _), place, size in zip((*sends, *recvs), places, sizes, strict=True)
        ]
        with comm.inside():
            for (_, data), place in zip(sends, places, strict=False):
                self._copy_in(place, data)
            number = len(sends)
            code = send_receive(messages[:number], messages[number:], comm.handle, stream)
            comm.settle(code, "ncclGroupEnd", Deadline(self.accept))
            event = self._own.record()
        back = [(data, place) for (_, data), place in zip(recvs, places[len(sends) :], strict=True)]
        return _Staged(self, event, block, back, (sends, recvs))

    def prepare(
        self, sends: Sequence[tuple[int, Array]], recvs: Sequence[tuple[int, Array]], tag: int
    ) -> Callable[[], Pending]:
        """Return what starts the same round any number of times."""
        return partial(self.post, sends, recvs, tag)

    def post_message(self, peer: int, data: Array, tag: int, *, receive: bool) -> Pending:
        """Start one message of the user's, whose lengths NCCL does not compare."""
        if tag:
            raise ArgumentValueError(
                f"tag={tag}: NCCL has no tags; messages arrive in the order of their sends"
            )
        # Those of one call go in one group, for NCCL does one thing after the other.
        message = _Message(self)
        self._waiting.append((message, peer, data, receive))
        return message

    def flush(self) -> None:
        """Send and receive what has been posted."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            sends = [(peer, data) for _, peer, data, receive in waiting if not receive]
            receives = [(peer, data) for _, peer, data, receive in waiting if receive]
            together = self._post(sends, receives)
            for message, *_ in waiting:
                message.sent = together

    def native(
        self,
        collective: str,
        dtype: DType,
        op: Op | None,
        count: int,
        *,
        in_turn: bool = False,  # noqa: ARG002 - all of them are in one order
    ) -> Native | None:
        """Return NCCL's own collective."""
        if not count or not is_native(collective) or unfit(collective, dtype, op) is not None:
            return None

        def start(x: Any, out: Any, root: int, in_place: bool) -> Callable[[], bool]:  # noqa: ARG001
            return self._collective(collective, dtype, op, count, x, out, root).test

        return start

    def _collective(
        self,
        collective: str,
        dtype: DType,
        op: Op | None,
        count: int,
        x: Any,
        out: Any,
        root: int,
    ) -> _Staged:
        """Start a collective on buffers of host arrays, None where this rank has none."""
        self.flush()
        comm, stream = self.comm, self.stream
        given = [one for one in (x, out) if one is not None]
        block, places = self._take([one.nbytes for one in given])
        placed = dict(zip(map(id, given), places, strict=True))

        def staged(one: Any) -> DeviceBuffer | None:
            if one is None:
                return None
            ordinal = comm.device.ordinal
            return DeviceBuffer(placed[id(one)], (one.count,), dtype, ordinal, None, stream)

        source, target = staged(x), staged(out)
        if collective == "broadcast":
            target = source
        call: Any = Call(collective, None, None, None, dtype, count, op, root)
        call.x, call.out, call.target = source, target, target
        with comm.inside():
            if x is not None:
                self._copy_in(placed[id(x)], x.octets)
            deadline = Deadline(self.accept)
            comm.settle(bind_native(call, comm)(stream, deadline), collective, deadline)
            event = self._own.record()
        written = x if collective == "broadcast" and comm.rank != root else out
        back = [] if written is None else [(written.octets, placed[id(written)])]
        return _Staged(self, event, block, back, (x, out))

    # ---------------------------------------------------------------------------- the rest

    def explain(self, error: BaseException) -> BaseException:
        """Return `error`, which is in pycomm's terms already."""
        return error

    def idle(self, spins: int) -> None:
        """Let others run."""
        time.sleep(0 if spins < _QUICK_LOOKS else _PAUSE)

    def notify(self, peer: int, note: bytes) -> Pending | None:  # noqa: ARG002
        """Return None: NCCL delivers nothing that nobody has asked for."""
        return None

    def notes(self) -> list[tuple[int, bytes]]:
        """Return no notes."""
        return []

    def split(self, ranks: Sequence[int]) -> _Split:
        """Start making a transport for `ranks`, who have met."""
        return _Split(self, tuple(ranks))

    def shrink(self, exclude: Sequence[int], deadline: Deadline, name: str) -> "StagedTransport":
        """Return a transport of all ranks but `exclude`; collective over those only."""
        if not self.comm.handle:
            raise CommError(
                "NCCL could not keep this communicator, so it cannot be shrunk: let one of the "
                "survivors call pycomm.get_unique_id(), and all of them from_unique_id()"
            )
        left = [rank for rank in range(self.size) if rank not in exclude]
        rank = left.index(self.rank)
        if exclude:
            making = shrink(self.comm, exclude, rank, len(left), name)
        else:  # which NCCL refuses to call shrinking
            making = split(self.comm, 0, rank, rank, len(left), name)
        hosts = tuple(self.hosts[rank] for rank in left)
        return StagedTransport(making.wait(deadline), hosts, self.accept)

    def close(self) -> None:
        """Free what is here; the communicator has been closed before."""
        self._free.clear()

    def abort(self) -> None:
        """End what is under way; the communicator is kept for `shrink`, if NCCL can do that."""
        if self.comm.error is None and self.comm.handle:
            self.comm.fail(CommError("the communicator was given up", rank=self.rank))


class _Told(Tested):
    """Something that is awaited as a transport is: under a deadline."""

    def __init__(
        self, transport: StagedTransport, gather: Native, own: Array, table: Array
    ) -> None:
        from pycomm.buffers import as_buffer

        super().__init__(gather(as_buffer(own), as_buffer(table), -1, False))
        self.transport = transport

    def abandon(self) -> None:
        """Do nothing: whoever waits gives up the communicator."""


def _host_key() -> int:
    """Return a number that is equal for processes of one host: one kernel, one network."""
    facts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            place = Path(path)
            known = place.readlink() if place.is_symlink() else place.read_text().strip()
            facts.append(str(known))
        except OSError:
            facts.append(f"process {os.getpid()}")  # not to be told from another host
    return int.from_bytes(hashlib.sha256("\n".join(facts).encode()).digest()[:8], "little")
