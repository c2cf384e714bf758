"""What is accepted as a device array, on which stream, and what is refused by name."""

import ctypes
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.gpu import Interfaced, Packed, to_device, write_late

import pycomm
from pycomm import ArgumentTypeError, ArgumentValueError, Communicator, dlpack
from pycomm.buffers import as_buffer
from pycomm.device_arrays import DeviceArray, allocate
from pycomm.device_buffers import DeviceBuffer
from pycomm.devices import current_device, device_count, device_of, get_device
from pycomm.dtypes import DTYPES
from pycomm.streams import LEGACY, PER_THREAD, Event, Stream, as_stream

pytestmark = pytest.mark.usefixtures("_slow")


@pytest.fixture
def _slow(libcuda: ctypes.CDLL):
    """Operations of streams start late, so that what does not wait for them reads old data."""
    libcuda.double_set_delay_us(2000)
    yield
    libcuda.double_set_delay_us(20)


@pytest.fixture
def alone():
    with pycomm.init("local", timeout=20) as comm:
        yield comm


def interfaced(**changes: Any) -> Interfaced:
    array = Interfaced(np.arange(6, dtype=np.float32).reshape(2, 3), 0)
    array.changes = changes
    return array


# ------------------------------------------------------------------------------------ protocols


@pytest.mark.parametrize(("shape", "count"), [((0,), 0), ((3, 0), 0), ((), 1)])
def test_empty_and_scalar_arrays(shape: tuple[int, ...], count: int) -> None:
    array = interfaced(shape=shape)
    if not count:
        array.changes["data"] = (0, False)
    found = as_buffer(array)
    assert isinstance(found, DeviceBuffer)
    assert (found.count, found.shape) == (count, shape)
    assert as_buffer(Packed(np.zeros(shape, np.float32), 0)).count == count


def test_strides_are_honoured() -> None:
    assert as_buffer(interfaced(strides=(12, 4))).count == 6
    assert as_buffer(interfaced(shape=(1, 6), strides=(999, 4))).count == 6  # an axis of one
    for strides in ((4, 8), (24, 4), (12, 8)):
        with pytest.raises(ArgumentValueError, match="strided"):
            as_buffer(interfaced(strides=strides))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"mask": object()}, ArgumentValueError, "masked"),
        ({"stream": 0}, ArgumentValueError, "stream 0"),
        ({"stream": -1}, ArgumentValueError, "no handle"),
        ({"stream": "x"}, ArgumentTypeError, "stream"),
        ({"typestr": ">f4"}, ArgumentTypeError, "byte order"),
        ({"typestr": "<M8[s]"}, ArgumentTypeError, "not supported"),
        ({"typestr": 4}, ArgumentTypeError, "typestr"),
        ({"shape": (-1,)}, ArgumentValueError, "negative"),
        ({"shape": 3}, ArgumentTypeError, "wrong"),
        ({"data": None}, ArgumentTypeError, "wrong"),
        ({"data": (0x1234, False)}, ArgumentValueError, "no memory of CUDA's"),
    ],
)
def test_wrong_interfaces(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        as_buffer(interfaced(**changes))


def test_misaligned_memory_is_refused() -> None:
    base = to_device(np.zeros(64, np.uint8), 0)
    with pytest.raises(ArgumentValueError, match="aligned"):
        as_buffer(interfaced(data=(base.pointer + 2, False)))


def test_freed_memory_is_refused() -> None:
    base = to_device(np.zeros(64, np.uint8), 0)
    pointer = base.pointer
    del base
    time.sleep(0.2)  # a thread frees it
    with pytest.raises(ArgumentValueError, match="freed"):
        as_buffer(interfaced(data=(pointer, False)))


def test_read_only_arrays(alone: Communicator) -> None:
    array = interfaced()
    array.changes = {"data": (array.base.pointer, True)}
    out = interfaced()
    assert alone.all_reduce(array, out) is out
    for call in (lambda: alone.all_reduce(array), lambda: alone.all_reduce(out, array)):
        with pytest.raises(ArgumentValueError, match="read-only"):
            call()


class Described(Packed):
    """Says of itself what it is told to: a DLPack tensor of its own."""

    def __init__(self, values: np.ndarray, **changes: Any) -> None:
        super().__init__(values, 0)
        self.changes = changes

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, **_: Any) -> Any:
        capsule = self.base.__dlpack__(max_version=(1, 0))
        head = dlpack._VersionedHead.from_address(
            dlpack._get_pointer(capsule, b"dltensor_versioned")
        )
        if "strides" in self.changes:
            for axis, step in enumerate(self.changes["strides"]):
                head.tensor.strides[axis] = step
        head.flags = self.changes.get("flags", 0)
        head.tensor.byte_offset = self.changes.get("byte_offset", 0)
        if "length" in self.changes:
            head.tensor.shape[0] = self.changes["length"]
        return capsule


def test_what_dlpack_says_is_honoured(alone: Communicator) -> None:
    square = np.arange(9, dtype=np.float32).reshape(3, 3)
    assert as_buffer(Described(square, strides=(3, 1))).count == 9
    with pytest.raises(ArgumentValueError, match="strided"):
        as_buffer(Described(square, strides=(1, 3)))
    readonly = Described(square, flags=1)
    out = Packed(square * 0, 0)
    alone.all_reduce(readonly, out)
    assert (out.numpy() == square).all()
    for call in (lambda: alone.all_reduce(readonly), lambda: alone.all_reduce(out, readonly)):
        with pytest.raises(ArgumentValueError, match="read-only"):
            call()
    shifted = Described(np.arange(9, dtype=np.float32), byte_offset=8, length=5)
    small = Packed(np.zeros(5, np.float32), 0)
    alone.all_reduce(shifted, small)
    assert small.numpy().tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3", "float8_e5m2"])
def test_types_without_a_name_in_the_interface(name: str) -> None:
    row = DTYPES[name]
    array = to_device(np.zeros(4, row.numpy), 0)
    assert array.__cuda_array_interface__["typestr"] == f"<V{row.itemsize}"
    assert as_buffer(array).dtype is row
    assert as_buffer(Packed(np.zeros(4, row.numpy), 0)).dtype is row
    nameless = Interfaced(np.zeros(4, row.numpy), 0)
    nameless.dtype = "torch.bfloat16"
    with pytest.raises(ArgumentTypeError, match="not supported"):
        as_buffer(nameless)


def test_all_dtypes_travel_by_dlpack() -> None:
    for row in DTYPES.values():
        found = as_buffer(Packed(np.zeros((2, 2), row.numpy), 0))
        assert (found.dtype, found.shape) == (row, (2, 2))


def test_host_and_device_do_not_mix(alone: Communicator) -> None:
    array, host = interfaced(), np.zeros((2, 3), np.float32)
    for call in (
        lambda: alone.all_reduce(array, host),
        lambda: alone.all_reduce(host, array),
        lambda: alone.send_recv(array, host, dest=0, source=0),
    ):
        with pytest.raises(ArgumentTypeError, match="host"):
            call()
    assert alone.all_reduce(host) is host
    with pytest.raises(ArgumentTypeError, match="stream"):
        alone.all_reduce(host, stream=1)


def test_buckets_are_for_hosts(alone: Communicator) -> None:
    with pytest.raises(ArgumentTypeError, match="on a device"):
        pycomm.GradientBuckets(alone, {"a": interfaced()})


def test_empty_arrays_never_reach_nccl(libcuda: ctypes.CDLL, alone: Communicator) -> None:
    libcuda.double_calls.restype = ctypes.c_ulonglong
    alone.all_reduce(interfaced())
    names = (b"ncclAllReduce", b"ncclAllGather", b"ncclSend", b"ncclRecv")
    before = [libcuda.double_calls(name) for name in names]
    empty = Packed(np.zeros((0, 3), np.float32), 0)
    for _ in range(2):
        assert alone.all_reduce(empty) is empty
        assert alone.all_gather(empty, Packed(np.zeros((0, 3), np.float32), 0)).numpy().size == 0
        alone.send_recv(empty, Packed(np.zeros(0, np.float32), 0), dest=0, source=0)
        alone.all_reduce(empty, algorithm="ring")
    assert [libcuda.double_calls(name) for name in names] == before


def test_the_device_that_was_asked_for_is_the_one() -> None:
    with pycomm.init("local", device=2, timeout=5) as comm:
        with pytest.raises(ArgumentValueError, match="device=2 was asked for"):
            comm.all_reduce(Interfaced(np.zeros(3, np.float32), 1))
        comm.all_reduce(Interfaced(np.zeros(3, np.float32), 2))
        assert comm.empty(3, device="cuda").device == 2
    with get_device(3).entered(), pycomm.init("local", timeout=5) as comm:
        assert comm.empty(3, device="cuda").device == 3


def test_devices_are_told_by_the_driver(alone: Communicator) -> None:
    assert device_count() == 4
    other = Interfaced(np.zeros(3, np.float32), 1)
    assert device_of(other.base.pointer) == 1
    alone.all_reduce(other)
    with pytest.raises(ArgumentValueError, match="works on device 1"):
        alone.all_reduce(interfaced())
    with pytest.raises(ArgumentTypeError, match="x is on device 0 and out is on device 1"):
        alone.all_reduce(interfaced(), Interfaced(np.zeros((2, 3), np.float32), 1))
    with pytest.raises(ArgumentValueError, match="no CUDA device 9"):
        get_device(9)
    identities = {get_device(number).uuid for number in range(4)}
    assert len(identities) == 4
    assert all(one.startswith("GPU-") for one in identities)


def test_new_arrays_are_of_the_same_kind(alone: Communicator) -> None:
    packed = Packed(np.arange(4, dtype=np.int32), 0)
    gathered = alone.all_gather(packed)
    assert type(gathered) is Packed
    assert gathered.numpy().tolist() == [0, 1, 2, 3]
    own = to_device(np.arange(4, dtype=np.int32), 0)
    assert type(alone.all_gather(own)) is DeviceArray
    with pytest.raises(ArgumentTypeError, match="out="):
        alone.all_gather(interfaced())


def test_own_arrays() -> None:
    array = to_device(np.arange(12).reshape(4, 3), 0)
    assert (len(array), array.size, array.nbytes, array.device) == (4, 12, 96, 0)
    assert array[1:3].copy().tolist() == [[3, 4, 5], [6, 7, 8]]
    assert array[3:1].shape == (0, 3)
    for wrong in (2, (1, 2), slice(0, 4, 2)):
        with pytest.raises((TypeError, ValueError)):
            array[wrong]
    capsule = array.__dlpack__()
    assert "dltensor" in repr(capsule)
    with pytest.raises(BufferError):
        array.__dlpack__(copy=True)
    assert "DeviceArray" in repr(array)


def settled(libcuda: ctypes.CDLL, expected: int) -> bool:
    """Return whether so many bytes are live, soon: a thread frees them."""
    for _ in range(200):
        if libcuda.double_allocated() == expected:
            return True
        time.sleep(0.01)
    return False


def test_memory_is_freed_with_its_last_view(libcuda: ctypes.CDLL) -> None:
    gc.collect()
    time.sleep(0.2)
    before = libcuda.double_allocated()
    array = allocate(get_device(0), (1 << 20,), DTYPES["uint8"])
    view = array[10:20]
    capsule = view.__dlpack__()
    del array
    assert libcuda.double_allocated() > before
    del view
    assert libcuda.double_allocated() > before
    time.sleep(0.1)
    assert libcuda.double_allocated() > before
    del capsule
    assert settled(libcuda, before)


# -------------------------------------------------------------------------------------- streams


class TorchStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class CupyStream:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


class AnyStream:
    def __init__(self, told: Any) -> None:
        self.told = told

    def __cuda_stream__(self) -> Any:
        return self.told


def test_all_spellings_of_a_stream() -> None:
    own = Stream(0)
    for one in (own, own.handle, TorchStream(own.handle), CupyStream(own.handle),
                AnyStream((0, own.handle)), np.uint64(own.handle)):  # fmt: skip
        assert as_stream(one) == own.handle
    assert as_stream(0) == 0
    for wrong in ("x", None, 1.5, True, AnyStream(3), AnyStream((1, 2)), AnyStream(None)):
        with pytest.raises(ArgumentTypeError):
            as_stream(wrong)
    with pytest.raises(ArgumentValueError):
        as_stream(-1)


@pytest.mark.parametrize("where", ["its own", "another", "named", "thread"])
def test_the_producer_comes_first(alone: Communicator, where: str) -> None:
    producer, other = Stream(0), Stream(0)
    array = Interfaced(np.zeros(1000, np.float32), 0, producer.handle)
    out = Interfaced(np.zeros(1000, np.float32), 0, producer.handle)
    held = write_late(array.base, np.arange(1000, dtype=np.float32), producer.handle)
    stream: Any = {
        "its own": None, "another": other, "named": LEGACY, "thread": PER_THREAD
    }[where]  # fmt: skip
    alone.all_reduce(array, out, stream=stream)
    if stream is None:
        producer.synchronize()
    elif stream is other:
        other.synchronize()
    else:
        with get_device(0).entered():
            from pycomm.bindings.cuda import cuda

            assert cuda.cuStreamSynchronize(stream) == 0
    assert out.base.copy().tolist() == list(range(1000))
    del held


def test_a_dlpack_producer_is_told_the_stream(alone: Communicator) -> None:
    producer = Stream(0)
    array = Packed(np.zeros(1000, np.float32), 0, producer)
    held = write_late(array.base, np.ones(1000, np.float32), producer.handle)
    out = Packed(np.zeros(1000, np.float32), 0)
    alone.all_reduce(array, out)
    assert set(array.asked) == {LEGACY}
    assert out.numpy().sum() == 1000
    del held


def test_no_wait_where_none_is_asked_for(libcuda: ctypes.CDLL, alone: Communicator) -> None:
    libcuda.double_calls.restype = ctypes.c_ulonglong
    array = Interfaced(np.zeros(10, np.float32), 0, None)
    alone.all_reduce(Interfaced(np.zeros(10, np.float32), 0))
    before = libcuda.double_calls(b"cuStreamWaitEvent")
    alone.all_reduce(array, stream=Stream(0))
    assert libcuda.double_calls(b"cuStreamWaitEvent") == before


@pytest.mark.parametrize("name", ["current_stream", "get_current_stream"])
def test_a_framework_is_asked_for_its_current_stream(
    alone: Communicator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import sys
    import types

    current = Stream(0)
    module = types.ModuleType("fake_torch")
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        **{name: lambda device: TorchStream(current.handle)}
    )
    monkeypatch.setitem(sys.modules, "fake_torch", module)

    class Tensor(Interfaced):
        __module__ = "fake_torch.tensors"

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            interface = super().__cuda_array_interface__
            del interface["stream"]
            return {**interface, "version": 2}

    array, out = (Tensor(np.zeros(100, np.float32), 0) for _ in range(2))
    held = write_late(array.base, np.ones(100, np.float32), current.handle)
    alone.all_reduce(array, out)
    current.synchronize()
    assert out.base.copy().sum() == 100
    del held


def test_the_default_stream_of_a_thread(alone: Communicator) -> None:
    array = Interfaced(np.ones(1000, np.float32), 0, PER_THREAD)

    def work() -> None:
        held = write_late(array.base, np.full(1000, 5, np.float32), PER_THREAD)
        alone.all_reduce(array)
        assert (array.numpy() == 5).all()
        del held

    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not failures


def test_the_context_stack_is_left_alone(libcuda: ctypes.CDLL, alone: Communicator) -> None:
    array = interfaced()
    assert current_device() is None
    alone.all_reduce(array)
    assert libcuda.double_context_depth() == 0
    with get_device(2).entered():
        alone.all_reduce(array, stream=Stream(0))
        alone.all_reduce(array, algorithm="ring")
        assert current_device() == 2
        assert libcuda.double_context_depth() == 1


# ------------------------------------------------------------------------------- work in flight


def test_work_waits_for_its_event(alone: Communicator) -> None:
    stream = Stream(0)
    array = Interfaced(np.ones(1000, np.float32), 0, stream.handle)
    work = alone.all_reduce(array, async_op=True)
    assert work.exception() is None
    assert work.wait() is array
    assert work.done()


def test_dropping_work_and_arrays_is_safe(alone: Communicator) -> None:
    stream = Stream(0)
    for number in range(50):
        array = Interfaced(np.full(1000, number, np.float32), 0, LEGACY)
        alone.all_reduce(array, stream=stream, async_op=True)
        del array
    stream.synchronize()


def test_events() -> None:
    stream = Stream(0)
    event = Event(0)
    assert event.done()
    array = to_device(np.zeros(10), 0)
    held = write_late(array, np.ones(10), stream.handle)
    event.record(stream)
    with pytest.raises(pycomm.CommTimeoutError):
        event.synchronize(1e-4)
    event.synchronize()
    assert event.done()
    other = Stream(0)
    other.wait(event)
    other.wait(stream)
    other.synchronize(5)
    assert "stream" in repr(other)
    del held
