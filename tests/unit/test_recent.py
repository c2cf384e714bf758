"""Calls that are remembered: found by their arguments, and only while these are what they were."""

import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import Communicator, recent
from pycomm.buffers import as_buffer
from pycomm.call import Call
from pycomm.dtypes import as_dtype
from pycomm.recent import Recent
from pycomm.transports.shared import REGIONS


def call_on(x: Any, out: Any) -> Call:
    first, second = as_buffer(x), as_buffer(out)
    return Call("all_reduce", first, second, second, as_dtype("f8"), first.flat.size)


def test_what_was_put_is_found_until_its_arrays_change() -> None:
    calls = Recent()
    x, out = np.zeros((4, 4)), np.zeros((4, 4))
    call = call_on(x, out)
    calls.put("key", call)
    assert calls.get("key") is call
    assert calls.get("other") is None
    assert calls.get(["not hashable"]) is None  # type: ignore[arg-type]

    out.flags.writeable = False
    assert calls.get("key") is None
    out.flags.writeable = True
    assert calls.get("key") is None  # it is gone, and will be checked anew
    calls.put("key", call)
    x.flags.writeable = False
    assert calls.get("key") is None
    x.flags.writeable = True
    calls.put("key", call)
    x.dtype = np.dtype(np.int64)  # type: ignore[misc]
    assert calls.get("key") is None
    x.dtype = np.dtype(np.float64)  # type: ignore[misc]
    calls.put("key", call)
    out.resize((100, 100), refcheck=False)  # its memory is somewhere else now
    assert calls.get("key") is None


def test_short_arrays_only_and_not_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_LONGEST", 1600)
    monkeypatch.setattr(recent, "_MOST", 4000)
    monkeypatch.setattr(recent, "_PART", 0)
    calls = Recent()
    calls.put("long", call_on(np.zeros(201), np.zeros(1)))
    assert calls.get("long") is None
    same = np.zeros(200)  # in place: it counts once
    calls.put("in place", call_on(same, same))
    assert calls.get("in place") is not None
    for index in range(2):
        x = np.zeros(200)
        calls.put(index, call_on(x, x))  # type: ignore[arg-type]
    assert calls.get("in place") is None
    assert calls.get(1) is not None  # type: ignore[arg-type]
    calls.clear()
    assert calls.get(1) is None  # type: ignore[arg-type]


def test_a_view_holds_all_of_its_array(monkeypatch: pytest.MonkeyPatch) -> None:
    long = np.zeros(4 << 20)  # 32 MiB
    for part, held in ((0, False), (1, True)):
        monkeypatch.setattr(recent, "_PART", part)
        calls = Recent()
        calls.put("view", call_on(long[:4], long[4:8]))
        assert (calls.get("view") is not None) is held
        assert sum(calls._held.values()) == held * long.nbytes
    calls = Recent()
    short = np.zeros(1 << 10)
    for index in range(300):
        calls.put(index, call_on(short[index : index + 1], short[index : index + 1]))  # type: ignore[arg-type]
    assert sum(calls._held.values()) == short.nbytes


def test_what_others_may_close_is_not_held() -> None:
    calls = Recent()
    for memory in (bytearray(64), mmap.mmap(-1, 64)):
        x = np.frombuffer(memory)
        calls.put("foreign", call_on(x, x))
        assert calls.get("foreign") is None
    registered = REGIONS.allocate(64).view(float)
    calls.put("registered", call_on(registered, registered))
    assert calls.get("registered") is not None


class Mine(np.ndarray[Any, Any]):
    """An array that is not a plain one: it may do as it likes."""


def test_arrays_of_others_are_not_remembered() -> None:
    calls = Recent()
    x = np.zeros(3).view(Mine)
    calls.put("mine", call_on(x, x))
    assert calls.get("mine") is None


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_communicator_that_has_ended_holds_no_arrays(end: str) -> None:
    def run(comm: Communicator) -> Any:
        x = np.ones(9)
        for _ in range(3):
            comm.all_reduce(x)
        getattr(comm, end)()
        held = weakref.ref(x)
        del x
        gc.collect()
        return held() is None

    assert pycomm.run_local(2, run, timeout=20) == [True, True]
