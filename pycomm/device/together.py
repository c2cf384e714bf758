"""NCCL's groups: what belongs together, and whose group is open on which thread.

A group belongs to a thread and not to a communicator: what any of them is given while it is open
starts at its end. So who works with NCCL asks first whether somebody else's group is open.
"""

import threading
from collections.abc import Sequence

from pycomm.bindings.nccl import nccl
from pycomm.errors import ArgumentValueError

__all__ = ["check_outside", "close_group", "open_group", "opened", "send_receive"]

_BYTE = 1  # ncclUint8
#: A message: peer, address, bytes.
Message = tuple[int, int, int]


class _Own(threading.local):
    group: object = None


_own = _Own()
#: The threads that have a group open, for a quick look.
opened: set[int] = set()


def check_outside(owner: object, what: str) -> None:
    """Raise if a group is open on this thread that is not `owner`'s.

    Raises
    ------
    ArgumentValueError
        If so: what is done there would start at its end only, or never.
    """
    if _own.group is not None and _own.group is not owner:
        raise ArgumentValueError(
            f"{what} inside a group() of another communicator, or on host arrays that go by NCCL: "
            "NCCL would start it at the end of that group, so it cannot be part of it"
        )


def open_group(owner: object) -> int:
    """Open a group on this thread; return NCCL's code."""
    _own.group = owner
    opened.add(threading.get_ident())
    return int(nccl.ncclGroupStart())


def close_group(owner: object) -> int:
    """Close it, if it is `owner`'s; return NCCL's code."""
    if _own.group is not owner or owner is None:
        return 0
    _own.group = None
    opened.discard(threading.get_ident())
    return int(nccl.ncclGroupEnd())


def send_receive(
    sends: Sequence[Message], receives: Sequence[Message], comm: int, stream: int
) -> int:
    """Give messages to a stream, all in flight together; return NCCL's code."""
    # Without bytes there is nothing to say that the order of the stream does not.
    sends, receives = ([one for one in messages if one[2]] for messages in (sends, receives))
    if not sends and not receives:
        return 0
    failed: int = 0
    ended: int = 0
    try:
        failed = nccl.ncclGroupStart()
        for peer, pointer, nbytes in sends:
            code = nccl.ncclSend(pointer, nbytes, _BYTE, peer, comm, stream)
            failed = failed or code
        for peer, pointer, nbytes in receives:
            code = nccl.ncclRecv(pointer, nbytes, _BYTE, peer, comm, stream)
            failed = failed or code
    finally:
        # Also after an interruption: NCCL would take all that follows for a part of the group.
        ended = nccl.ncclGroupEnd()
    return failed or ended
