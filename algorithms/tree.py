"""Trees: binomial for short messages, two binary ones at once for long ones.

In a binomial broadcast whoever has the data sends it to a rank half as far away as the last time.
Reduce is the same backwards, all_reduce one after the other.

Of a binary tree, half of the ranks are leaves, which send nothing. So there are two trees, each for
half of the data, and a rank is a leaf in at least one of them: the second tree is the first one
mirrored, or shifted by one for an odd number of ranks. The root stands above both. Long data goes
in many segments that follow each other.

Depth and bytes a rank, for D bytes on n ranks: binomial ceil(log2 n) steps, up to ceil(log2 n) D
bytes at the root; double tree about log2(n) + 1 steps a segment, at most D bytes; all_reduce twice
that. Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009.
"""

from pycomm.algorithms.compose import Rounds, mirrored
from pycomm.algorithms.schedule import Recv, Round, Schedule, Send, one

__all__ = [
    "binomial_all_reduce",
    "binomial_broadcast",
    "binomial_reduce",
    "double_tree_all_reduce",
    "double_tree_broadcast",
    "double_tree_reduce",
]


def binomial_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Return the binomial broadcast."""
    return Schedule("broadcast", rank, size, 1, _binomial(rank, size, root), root)


def binomial_reduce(rank: int, size: int, root: int) -> Schedule:
    """Return the binomial reduce: the broadcast backwards."""
    return Schedule("reduce", rank, size, 1, _to_root(_binomial(rank, size, root)), root)


def binomial_all_reduce(rank: int, size: int) -> Schedule:
    """Return the binomial all_reduce: a reduce to rank 0, and a broadcast from there."""
    down = _binomial(rank, size, 0)
    return Schedule("all_reduce", rank, size, 1, _to_root(down) + down)


def double_tree_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Return the broadcast down two binary trees, each with half of the data."""
    return Schedule("broadcast", rank, size, 2, _double_tree(rank, size, root), root)


def double_tree_reduce(rank: int, size: int, root: int) -> Schedule:
    """Return the reduce up two binary trees, each with half of the data."""
    return Schedule("reduce", rank, size, 2, _to_root(_double_tree(rank, size, root)), root)


def double_tree_all_reduce(rank: int, size: int) -> Schedule:
    """Return the all_reduce up and down two binary trees, each with half of the data."""
    down = _double_tree(rank, size, 0)
    return Schedule("all_reduce", rank, size, 2, _to_root(down) + down)


def _to_root(down: Rounds) -> Rounds:
    return mirrored(down, reduce=True)


def _binomial(rank: int, size: int, root: int) -> Rounds:
    """Return the rounds of a broadcast, one for each step of the whole."""
    place = (rank - root) % size
    rounds: list[Round] = []
    far = 1 << (size - 1).bit_length() >> 1
    while far:
        steps: Round = ()
        if place % (2 * far) == 0 and place + far < size:
            steps = (Send((rank + far) % size, one(0)),)
        elif place % (2 * far) == far:
            steps = (Recv((rank - far) % size, one(0), False),)
        rounds.append(steps)
        far >>= 1
    return tuple(rounds)


def _double_tree(rank: int, size: int, root: int) -> Rounds:
    """Return the rounds of a broadcast down both trees; the places 1, 2, ... are their nodes."""
    if size == 1:
        return ()
    place = (rank - root) % size
    nodes = size - 1

    def ranked(number: int) -> int:
        return (number + root) % size

    def to(numbers: list[int], chunk: int) -> Round:
        return tuple(Send(ranked(number), one(chunk)) for number in numbers)

    top = 1 << (nodes.bit_length() - 1)
    if place == 0:
        return (to([top], 0) + to([_second_to_place(top, nodes)], 1),)
    above, below = _node(place, nodes)
    number = _place_to_second(place, nodes)
    above2, below2 = _node(number, nodes)
    above2 = above2 and _second_to_place(above2, nodes)
    below2 = [_second_to_place(child, nodes) for child in below2]
    first: Round = (Recv(ranked(above), one(0), False),)
    second: Round = (Recv(ranked(above2), one(1), False),)
    # What a leaf receives goes nowhere, so it can come while the other half is handed on: neither
    # tree waits for the other.
    if not below2:
        rounds = (first, to(below, 0) + second)
    elif not below:
        rounds = (second, to(below2, 1) + first)
    else:
        raise AssertionError(f"place {place} of {size} is a leaf in neither tree")
    return tuple(steps for steps in rounds if steps)


def _node(number: int, nodes: int) -> tuple[int, list[int]]:
    """Return parent (0 for the top) and children of a node among 1 to `nodes`, in order.

    Odd nodes are leaves; a node with k zeros at its end stands k levels above them.
    """
    parent = 0
    if number != 1 << (nodes.bit_length() - 1):
        parent = _above(number)
        while parent > nodes:  # the tree is not full: the next ancestor that exists
            parent = _above(parent)
    children = []
    half = (number & -number) >> 1
    if half:
        children.append(number - half)
        while half and number + half > nodes:
            half >>= 1
        if half:
            children.append(number + half)
    return parent, children


def _above(number: int) -> int:
    """Return the parent of a node in a tree without end."""
    low = number & -number
    return (number & ~low) | (low << 1)


def _place_to_second(place: int, nodes: int) -> int:
    """Return the number that a place has in the second tree."""
    return nodes + 1 - place if nodes % 2 == 0 else place % nodes + 1


def _second_to_place(number: int, nodes: int) -> int:
    return nodes + 1 - number if nodes % 2 == 0 else (number - 2) % nodes + 1
