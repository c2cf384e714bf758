"""Pictures of topologies: every shape, nothing above anything else, equal files."""

import importlib.util
from dataclasses import replace
from itertools import combinations

import pytest
from support.topologies import (
    SHAPES,
    bare_host,
    bare_hosts,
    cube_mesh,
    gpu_snapshot,
    ill_node,
    nvswitch_node,
    three_hosts,
)

from pycomm.errors import ArgumentValueError, LibraryNotFoundError
from pycomm.topology import merge, read_smi
from pycomm.topology.graph import Link, LinkKind, State, Topology
from pycomm.topology.picture import Box, arrange
from pycomm.topology.plot import _Sheet, plot
from pycomm.topology.snapshot import Place, Snapshot

FRAMES = ("host", "numa")


def _apart(a: Box, b: Box) -> bool:
    thin = 1e-9
    return (
        a.x + a.width <= b.x + thin
        or b.x + b.width <= a.x + thin
        or a.y + a.height <= b.y + thin
        or b.y + b.height <= a.y + thin
    )


def _inside(outer: Box, inner: Box) -> bool:
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_no_box_lies_on_another(make) -> None:
    picture = arrange(make())
    kinds = {
        box.kind: [one for one in picture.boxes if one.kind == box.kind] for box in picture.boxes
    }
    for frames in (kinds.get("host", []), kinds.get("numa", [])):
        assert all(_apart(a, b) for a, b in combinations(frames, 2))
    things = [box for box in picture.boxes if box.kind not in FRAMES]
    assert all(_apart(a, b) for a, b in combinations(things, 2))
    for box in things:
        assert any(_inside(host, box) for host in kinds["host"]), box
        if box.kind in ("gpu", "nic", "pci"):
            assert any(_inside(numa, box) for numa in kinds["numa"]), box
        else:
            assert all(_apart(numa, box) for numa in kinds.get("numa", [])), box
    for box in picture.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= picture.width + 1e-9
        assert box.y + box.height <= picture.height + 1e-9


@pytest.mark.parametrize("make", [cube_mesh, three_hosts])
def test_labels_of_arcs_are_apart(make) -> None:
    tops = [
        ((line.x0 + line.x1) / 2, (line.y0 + line.y1) / 2 + line.rise)
        for line in arrange(make()).lines
        if line.rise and line.label
    ]
    assert len(tops) > 5
    for (x0, y0), (x1, y1) in combinations(tops, 2):
        assert abs(x0 - x1) > 0.4 or abs(y0 - y1) > 0.15


def test_what_the_lines_say() -> None:
    picture = arrange(three_hosts())
    told = {line.label: line.state for line in picture.lines if line.rise < 0}
    assert told == {
        "TCP · 117 MB/s · 45 µs": State.UP,
        "TCP · 31 MB/s · 48 µs · DEGRADED": State.DEGRADED,
        "TCP · DOWN": State.DOWN,
    }
    assert picture.title == "3 hosts · 6 ranks · 3 NICs · 3 NUMA nodes"
    assert "node2 - node3 is down: ranks 4, 5 do not answer" in picture.remarks
    ill = arrange(ill_node())
    assert len(ill.remarks) == 5
    assert {box.title: box.state for box in ill.boxes}["GPU5"] is State.DOWN
    assert ill.meanings["NV18"] == "18 NVLinks, 478.8 GB/s"
    assert arrange(nvswitch_node()).title == "node1 · 8 GPUs · 8 NICs · 2 NUMA nodes · 4 NVSwitches"
    boxes = arrange(gpu_snapshot()).boxes
    assert [box.details for box in boxes if box.kind == "gpu"][9] == ("rank 9",)


def test_a_matrix_with_too_many_links_for_a_gpu_has_a_bar() -> None:
    rows = [f"GPU{a}\t" + "\t".join("X" if a == b else "NV18" for b in range(4)) for a in range(4)]
    picture = arrange(
        read_smi("\t" + "\t".join(f"GPU{n}" for n in range(4)) + "\n" + "\n".join(rows))
    )
    assert [box.title for box in picture.boxes if box.kind == "nvswitch"] == [
        "NVLink between any two"
    ]
    assert [line.label for line in picture.lines] == ["NV18"] * 4


def test_many_hosts_are_boxes_with_numbers() -> None:
    topology = merge([nvswitch_node(host=f"n{number}") for number in range(6)])
    picture = arrange(topology)
    assert {box.kind for box in picture.boxes} == {"host"}
    assert picture.boxes[0].details == ("8 GPUs, 8 NICs, 2 NUMA nodes, 4 NVSwitches",)
    crowd = merge([bare_host("one")])
    places = tuple(Place(rank, "one") for rank in range(20))
    assert [
        box.title for box in arrange(Snapshot(1, crowd, places)).boxes if box.kind == "rank"
    ] == ["ranks 0-19"]


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_drawn(make, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    plot(make(), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 500


def test_equal_topologies_give_equal_files(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, make in (("png", bare_hosts), ("svg", three_hosts), ("pdf", ill_node)):
        first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
        plot(make(), first)
        plot(make(), str(second))
        assert first.read_bytes() == second.read_bytes()


def test_a_picture_that_is_too_large_gets_fewer_dots() -> None:
    pytest.importorskip("matplotlib")
    names = [f"h{number}" for number in range(60)]
    topology = merge([bare_host(name) for name in names])
    link = Link(names[0], names[-1], LinkKind.TCP, state=State.UP)
    sheet = _Sheet(arrange(replace(topology, links=(link,))), [])
    assert 20 < sheet.dpi < 150
    assert sheet.dpi * max(sheet.width, sheet.height) <= 16000


def test_refusals(tmp_path, monkeypatch) -> None:
    with pytest.raises(ArgumentValueError, match=r"must end in \.png, \.svg, \.pdf"):
        plot(Topology(), tmp_path / "x.jpg")
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentValueError, match="No such file"):
        plot(Topology(), tmp_path / "none" / "x.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LibraryNotFoundError, match=r"pip install 'pycomm-collectives\[bench\]'"):
        plot(Topology(), tmp_path / "x.png")
