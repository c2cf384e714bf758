"""Arrays of any origin, good and bad."""

import array
import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pycomm import ArgumentTypeError, ArgumentValueError
from pycomm.buffers import as_buffer, new_like, same_memory
from pycomm.dlpack import from_dlpack


class Producer:
    """Exports a NumPy array by DLPack only, as frameworks do."""

    def __init__(self, inner: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)) -> None:
        self.inner = inner
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.inner.__dlpack__(**arguments)


class OldProducer(Producer):
    """From before DLPack 1.0: does not know max_version."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.inner.__dlpack__()


class CudaArray:
    def __init__(self, shape: tuple[int, ...] = (3,), pointer: int = 1 << 40) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (pointer, False),
            "version": 3,
        }


def test_numpy_is_not_copied() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = as_buffer(x, writable=True)
    assert (buffer.count, buffer.nbytes, buffer.dtype.name) == (6, 24, "float32")
    assert buffer.result() is x
    assert buffer.pointer == x.ctypes.data
    buffer.flat[0] = 7
    assert x[0, 0] == 7
    assert buffer.octets.size == 24


@pytest.mark.parametrize(
    "x",
    [
        bytearray(b"abc"),
        memoryview(bytearray(b"abc")),
        array.array("d", [1.0, 2.0]),
        (ctypes.c_int * 3)(1, 2, 3),
    ],
)
def test_buffer_protocol(x: Any) -> None:
    buffer = as_buffer(x, writable=True)
    assert buffer.result() is x
    before = bytes(memoryview(x).cast("B"))
    buffer.octets[0] ^= 255
    assert bytes(memoryview(x).cast("B")) != before


def test_array_interface_keeps_its_owner_alive() -> None:
    class Exporter:
        def __init__(self) -> None:
            self.inner = np.arange(4)
            self.__array_interface__ = self.inner.__array_interface__

    buffer = as_buffer(Exporter())
    assert buffer.array.tolist() == [0, 1, 2, 3]


def test_odd_shapes() -> None:
    for shape in ((), (0,), (3, 0), (1, 1, 1)):
        x = np.zeros(shape, np.int16)
        assert as_buffer(x, writable=True).count == x.size
        assert as_buffer(Producer(x)).count == x.size
    # Strides of axes of length 1 mean nothing.
    x = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (1, 4), (999, 4))
    assert as_buffer(x).count == 4


def test_strided_and_fortran_are_refused() -> None:
    a = np.zeros((4, 4), np.float32)
    for x, word in (
        (a[:, 0], "strided"),
        (a[::2], "strided"),
        (a[::-1], "strided"),
        (np.broadcast_to(a, (2, 4, 4)), "strided"),
        (a[:, 1:].T, "strided"),
        (np.asfortranarray(np.zeros((2, 3))), "Fortran-ordered"),
        (np.zeros((2, 3)).T, "Fortran-ordered"),
        (memoryview(bytearray(8))[::2], "strided"),
    ):
        with pytest.raises(ArgumentValueError, match=word) as caught:
            as_buffer(x)
        assert "strides" in str(caught.value)


def test_read_only_is_fine_as_input_only() -> None:
    x = np.arange(3)
    x.flags.writeable = False
    for source in (x, b"abc", memoryview(b"abc"), np.float32(3), Producer(x)):
        as_buffer(source)
        with pytest.raises(ArgumentValueError, match="read-only"):
            as_buffer(source, writable=True)


@pytest.mark.parametrize(
    "x",
    [
        3.5,
        [1.0, 2.0],
        "text",
        None,
        {"a": 1},
        np.ma.masked_array([1, 2], [0, 1]),
        np.array([object()]),
        np.array(["a"]),
        np.zeros(2, ">f4" if np.dtype("f4").str[0] == "<" else "<f4"),
        np.zeros(2, [("a", "f4")]),
    ],
)
def test_what_is_no_array_of_numbers(x: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        as_buffer(x)


def test_other_devices_are_named() -> None:
    with pytest.raises(ArgumentTypeError, match="device 10:0"):
        as_buffer(Producer(np.zeros(3), (10, 0)))


@pytest.mark.parametrize("producer", [Producer, OldProducer])
def test_dlpack_views_and_strides(producer: type[Producer]) -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    view = from_dlpack(producer(x))
    assert view.tolist() == x.tolist()
    view[0, 0] = 9
    assert x[0, 0] == 9
    for strided in (x.T, x[:, :2]):
        assert from_dlpack(producer(strided)).tolist() == strided.tolist()
        with pytest.raises(ArgumentValueError):
            as_buffer(producer(strided))
    for dtype in ("f2", "f8", "c8", "c16", "i1", "u8", "?"):
        y = np.ones(3, dtype)
        assert from_dlpack(producer(y)).dtype == y.dtype


def test_dlpack_offset_and_lifetime() -> None:
    view = from_dlpack(Producer(np.arange(1000)[500:]))
    assert view[0] == 500
    assert int(view.sum()) == sum(range(500, 1000))


class Managed(ctypes.Structure):
    """DLManagedTensor, written from the specification apart from the reader under test."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class RawProducer:
    """Makes a capsule by hand: for dtypes NumPy cannot export, and for NULL pointers."""

    def __init__(self, memory: Any, code: int, bits: int, shape: tuple[int, ...], lanes: int = 1):
        self.memory = memory
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        pointer = None if memory is None else memory.ctypes.data
        self.managed = Managed(
            pointer, 1, 0, len(shape), code, bits, lanes, ctypes.addressof(self.shape), None, 0
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        make.restype = ctypes.py_object
        return make(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [
        (ml_dtypes.bfloat16, 4, 16),
        (ml_dtypes.float8_e4m3fn, 10, 8),
        (ml_dtypes.float8_e5m2, 12, 8),
    ],
)
def test_dlpack_dtypes_that_numpy_lacks(dtype: Any, code: int, bits: int) -> None:
    x = np.array([1.0, -2.0, 0.5], dtype)
    producer = RawProducer(x, code, bits, (3,))
    buffer = as_buffer(producer, writable=True)
    assert buffer.dtype.numpy == x.dtype
    assert buffer.array.tolist() == x.tolist()


def test_dlpack_null_strides_null_data_and_unknown_dtypes() -> None:
    x = np.arange(6, dtype=np.float32)
    assert from_dlpack(RawProducer(x, 2, 32, (2, 3))).tolist() == x.reshape(2, 3).tolist()
    assert from_dlpack(RawProducer(None, 2, 32, (0, 3))).shape == (0, 3)
    for code, bits, lanes in ((3, 64, 1), (2, 32, 4), (0, 4, 1)):
        with pytest.raises(ArgumentTypeError, match="not supported"):
            from_dlpack(RawProducer(x, code, bits, (1,), lanes))


def test_dlpack_refusal_keeps_its_reason() -> None:
    class Refusing(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("requires grad")

    with pytest.raises(ArgumentTypeError, match="requires grad") as caught:
        as_buffer(Refusing(np.zeros(3)))
    assert isinstance(caught.value.__cause__, BufferError)


def test_same_memory() -> None:
    x = np.arange(8)
    whole = as_buffer(x)
    assert same_memory(whole, as_buffer(x))
    assert same_memory(whole, as_buffer(x[:]))
    assert same_memory(as_buffer(x[2:4]), as_buffer(x[2:4]))
    assert not same_memory(whole, as_buffer(np.arange(8)))
    assert not same_memory(as_buffer(x[:4]), as_buffer(x[4:]))
    for a, b in ((x, x[1:]), (x[:5], x[3:]), (x, x[:4])):
        with pytest.raises(ArgumentValueError, match="overlap"):
            same_memory(as_buffer(a), as_buffer(b))


def test_new_arrays_are_of_the_callers_kind() -> None:
    x = np.zeros(3, np.float32)
    made = new_like(as_buffer(x), (2, 3))
    assert type(made.result()) is np.ndarray
    assert made.result().shape == (2, 3)
    assert type(new_like(as_buffer(bytearray(4)), (8,)).result()) is np.ndarray

    class Namespace:
        @staticmethod
        def from_dlpack(inner: Any) -> Producer:
            return Producer(np.array(inner))  # copies, as some libraries do

    class WithNamespace(Producer):
        def __array_namespace__(self) -> Any:
            return Namespace

    made = new_like(as_buffer(WithNamespace(x)), (2,))
    made.flat[:] = 5
    assert made.result().inner.tolist() == [5, 5]

    class WithNewEmpty(Producer):
        def new_empty(self, shape: tuple[int, ...]) -> Producer:
            return Producer(np.empty(shape, self.inner.dtype))

    assert isinstance(new_like(as_buffer(WithNewEmpty(x)), (2,)).result(), Producer)

    class OfNoKnownLibrary(Producer):
        __module__ = "nowhere"

    with pytest.raises(ArgumentTypeError, match="pass out="):
        new_like(as_buffer(OfNoKnownLibrary(x)), (2,))
