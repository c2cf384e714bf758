"""Collectives that NCCL does itself, bound to the arrays of one call.

What NCCL lacks is built from what it has: gather, scatter and all_to_all from sends and receives
where it is older than 2.28; bool as uint8; complex numbers as pairs of reals.
"""

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from pycomm.bindings.nccl import nccl
from pycomm.bindings.nccl_types import coll_config
from pycomm.call import Call
from pycomm.deadline import Deadline
from pycomm.device.together import send_receive
from pycomm.dtypes import DTYPES, DType, Kind, Op, PremulSum, ReduceOp
from pycomm.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from pycomm.stream_memory import StreamMemory, copy
from pycomm.transports.nccl import NCCLComm

__all__ = [
    "Enqueue",
    "Prepared",
    "bind_native",
    "check_hint",
    "is_native",
    "native_name",
    "prepared",
    "unfit",
]

#: ``enqueue(stream, deadline) -> code``: gives work to a stream, and returns what NCCL says.
Enqueue = Callable[[int, Deadline], int]
#: A bare function of NCCL, and prepared arguments: see `Table.bare`.
Prepared = tuple[Callable[..., int], tuple[Any, ...]]

_pointer = ctypes.c_void_p.from_param

_OPS = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.AVG: 4,
}
# Of bools, as numbers 0 and 1: a sum is a logical or.
_BOOL_OPS = {ReduceOp.SUM: 2, ReduceOp.MAX: 2, ReduceOp.PROD: 3, ReduceOp.MIN: 3}
#: First versions of what not every NCCL has.
_AVG_SINCE = (2, 10)
_CONFIG_SINCE = "2.31"

_BYTE = 1  # ncclUint8

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_FUNCTIONS = {
    "all_reduce": "ncclAllReduce",
    "reduce": "ncclReduce",
    "reduce_scatter": "ncclReduceScatter",
    "all_gather": "ncclAllGather",
    "broadcast": "ncclBroadcast",
    "all_to_all": "ncclAlltoAll",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
}


def is_native(collective: str) -> bool:
    """Return whether NCCL has a collective, or messages that it can be made of."""
    return collective in _FUNCTIONS


def native_name(collective: str) -> str:
    """Return the name of NCCL's function for a collective."""
    return _FUNCTIONS[collective]


def unfit(collective: str, dtype: DType, op: Op | None) -> str | None:
    """Return why NCCL cannot do a collective itself; None if it can."""
    if collective not in _REDUCING or op is None:
        return None
    if dtype.kind is Kind.COMPLEX and isinstance(op, PremulSum) and isinstance(op.factor, complex):
        return "NCCL multiplies by real factors only"
    if dtype.kind in (Kind.BOOL, Kind.COMPLEX):
        return None
    if dtype.nccl is None:
        return f"NCCL has no {dtype.name}"
    if dtype.nccl_since > nccl.version[:2]:
        first = ".".join(map(str, dtype.nccl_since))
        return f"NCCL has {dtype.name} from {first} on, and this is {nccl.library.version}"
    if op is ReduceOp.AVG and nccl.version[:2] < _AVG_SINCE:
        return f"NCCL has averages from 2.10 on, and this is {nccl.library.version}"
    return None


def bind_native(
    call: Call, comm: NCCLComm, hint: str | None = None, ready: Prepared | None = None
) -> Enqueue:
    """Return what gives a call to a stream; its arguments are converted once.

    Parameters
    ----------
    call : Call
        One that is not `unfit`.
    comm : NCCLComm
        The ranks.
    hint : str, optional
        Which of NCCL's own algorithms it may use, such as ``"ring"`` or ``"tree,ring"``.
    ready : tuple, optional
        What `prepared` has returned for it.

    Raises
    ------
    UnsupportedError
        If there is a hint, and NCCL is older than 2.31.
    """
    if not call.count:
        return _nothing
    name = _FUNCTIONS[call.collective]
    if hint is None and not nccl.has(name):
        return _from_messages(call, comm)
    if isinstance(call.op, PremulSum):
        return _with_factor(call, comm, hint)
    if ready is None:
        ready = _function(call, hint), _rest(call, comm, None)
    return _bound(call, comm, ready)


def _nothing(stream: int, deadline: Deadline) -> int:  # noqa: ARG001
    """Give nothing: there is no data, on any rank."""
    return 0


def _bound(call: Call, comm: NCCLComm, ready: Prepared) -> Enqueue:
    function, rest = ready
    target = call.target if call.collective == "broadcast" else call.out
    send = [0 if call.x is None else call.x.pointer]
    receive = _pointer(0 if target is None else target.pointer)

    def enqueue(stream: int, deadline: Deadline) -> int:  # noqa: ARG001
        return function(_pointer(send[0]), receive, *rest, _pointer(stream))

    return _out_of_place(call, comm, send, enqueue)


def prepared(call: Call, comm: NCCLComm) -> Prepared | None:
    """Return NCCL's function for a call, and its arguments between the pointers and the stream.

    None for a premultiplied sum, whose operation is made for each call.
    """
    if isinstance(call.op, PremulSum):
        return None
    return _function(call, None), _rest(call, comm, None)


def _rest(call: Call, comm: NCCLComm, made: int | None) -> tuple[Any, ...]:
    """Return those arguments; `made` is the operation, if it was made for the call."""
    kind, count, op = _numbers(call)
    number = ctypes.c_int.from_param
    arguments = [ctypes.c_size_t.from_param(count), number(kind)]
    if made is not None or op is not None:
        arguments.append(number(op if made is None else made))
    if call.root >= 0:
        arguments.append(number(call.root))
    return (*arguments, _pointer(comm.handle))


def _function(call: Call, hint: str | None) -> Callable[..., int]:
    """Return NCCL's function for a call, bare; with a hint one that passes it on."""
    name = _FUNCTIONS[call.collective]
    if hint is None:
        return cast("Callable[..., int]", nccl.bare(name))
    name += "Config"
    if not nccl.has(name):
        raise UnsupportedError(
            f"algorithm 'nccl:{hint}' needs {name}, which NCCL has from {_CONFIG_SINCE} on; this "
            f"is {nccl.library.version} ({nccl.library.path}). NCCL_ALGO={hint} in the environment "
            "chooses for all calls"
        )
    settings = coll_config(algSelection=hint.encode())
    configured = nccl.bare(name)

    def function(*arguments: Any) -> int:
        return int(configured(*arguments, ctypes.byref(settings)))

    return function


def _with_factor(call: Call, comm: NCCLComm, hint: str | None) -> Enqueue:
    """Return what makes the operation of a premultiplied sum for each run, and ends it after that.

    Kept ones would add up, for factors may differ from step to step.
    """
    assert isinstance(call.op, PremulSum)
    function = _function(call, hint)
    kind = _numbers(call)[0]
    dtype = call.dtype
    if dtype.kind is Kind.COMPLEX:
        dtype = DTYPES[f"float{4 * dtype.itemsize}"]
    factor = call.op.factor if dtype.kind is Kind.INT else float(call.op.factor.real)
    scalar = np.array(factor, dtype.numpy).tobytes()

    def give(stream: int, deadline: Deadline) -> int:
        operation = comm.begin_factor(kind, scalar)
        try:
            enqueue = _bound(call, comm, (function, _rest(call, comm, operation)))
            comm.settle(enqueue(stream, deadline), call.collective, deadline)
        finally:
            comm.end_factor(operation)
        return 0

    return give


def _out_of_place(call: Call, comm: NCCLComm, send: list[int], enqueue: Enqueue) -> Enqueue:
    """Return `enqueue`; of an all_to_all in place one that sends from a copy."""
    if call.collective != "all_to_all" or not _in_place(call):
        return enqueue
    assert call.x is not None
    source, nbytes = call.x.pointer, call.x.nbytes

    def copied(stream: int, deadline: Deadline) -> int:
        with StreamMemory(comm.device).run(stream) as memory:
            send[0] = memory.take(nbytes)
            copy(send[0], source, nbytes, stream)
            # NCCL may take it over later; memory that is given back before that is gone.
            comm.settle(enqueue(stream, deadline), call.collective, deadline)
        return 0

    return copied


def _in_place(call: Call) -> bool:
    return call.x is not None and call.out is not None and call.x.pointer == call.out.pointer


def _numbers(call: Call) -> tuple[int, int, int | None]:
    """Return NCCL's dtype, count and op of a call; no op of a premultiplied sum."""
    dtype, count, op = call.dtype, call.count, call.op
    if call.collective not in _REDUCING or op is None:
        # As bytes: what is only moved may be of a type that NCCL does not know.
        return _BYTE, count * dtype.itemsize, None
    if dtype.kind is Kind.BOOL:
        assert isinstance(op, ReduceOp)
        return _BYTE, count, _BOOL_OPS[op]
    if dtype.kind is Kind.COMPLEX:
        dtype, count = DTYPES[f"float{4 * dtype.itemsize}"], 2 * count
    assert dtype.nccl is not None
    return dtype.nccl, count, None if isinstance(op, PremulSum) else _OPS[op]


def _from_messages(call: Call, comm: NCCLComm) -> Enqueue:
    """Return a collective made of sends and receives."""
    nbytes = call.count * call.dtype.itemsize
    source = [0 if call.x is None else call.x.pointer]
    target = 0 if call.out is None else call.out.pointer
    everyone = range(comm.size)
    peers_in = peers_out = everyone
    if call.collective == "gather":
        peers_out = range(call.root, call.root + 1)
        peers_in = everyone if comm.rank == call.root else range(0)
    elif call.collective == "scatter":
        peers_in = range(call.root, call.root + 1)
        peers_out = everyone if comm.rank == call.root else range(0)
    # Where there is only one peer, the data is one part and not one of several.
    sends = [(peer, peer * nbytes if len(peers_out) > 1 else 0) for peer in peers_out]
    receives = [(peer, target + (peer * nbytes if len(peers_in) > 1 else 0)) for peer in peers_in]
    handle = comm.handle

    def enqueue(stream: int, deadline: Deadline) -> int:  # noqa: ARG001
        start = source[0]
        return send_receive(
            [(peer, start + offset, nbytes) for peer, offset in sends],
            [(peer, pointer, nbytes) for peer, pointer in receives],
            handle,
            stream,
        )

    return _out_of_place(call, comm, source, enqueue)


def check_hint(algorithm: str) -> str | None:
    """Return what follows ``nccl:`` in the name of an algorithm; None if it names no such thing.

    Raises
    ------
    ArgumentValueError
        If nothing follows.
    """
    head, colon, hint = algorithm.partition(":")
    if head != "nccl" or not colon:
        return None
    if not hint.strip():
        raise ArgumentValueError("algorithm 'nccl:' names none of NCCL's; for instance 'nccl:ring'")
    if not hint.isascii():
        raise ArgumentTypeError(f"algorithm {algorithm!r} is not ASCII")
    return hint
