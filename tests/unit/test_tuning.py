"""Files of measurements: written, read, and refused with a reason; decisions from measurements."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import ArgumentValueError, Communicator, tune
from pycomm.algorithms import Link, Model, names
from pycomm.algorithms.registry import SHARED
from pycomm.algorithms.schedule import COLLECTIVES
from pycomm.algorithms.select import EVERYTHING, Rule, built_in, preferences
from pycomm.cli import main
from pycomm.tuning import Entry, check_writable, default_path, find, machine, read, write

HERE = {"cpu": "Abacus", "cores": 2, "library": "threads"}
MODEL = Model(Link(1e-6, 1e9), Link(2e-6, 1e8), 1e10, 1)
TABLE = {"all_reduce": (Rule(1000, ("ring", "direct")), Rule(EVERYTHING, ("native", "direct")))}
ENTRY = Entry((2,), {"host": TABLE}, MODEL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "tuning.json"


def test_what_is_written_is_read(path: Path) -> None:
    write(path, ENTRY, HERE)
    other = Entry((2, 2), {"host": TABLE}, MODEL, (1e9, 2e9, 1e9, 2e9))
    write(path, other, HERE)
    newer = Entry((2,), {"host": {"broadcast": (Rule(EVERYTHING, ("binomial",)),)}}, MODEL)
    write(path, newer, HERE)
    tuning = read(path, HERE)
    assert tuning.entries == (newer, other)
    assert tuning.entry((2, 2)) == other
    assert tuning.entry((3,)) is None
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]
    # Another machine's entries do not stay beside one's own.
    write(path, ENTRY, {**HERE, "cores": 4})
    assert read(path, {**HERE, "cores": 4}).entries == (ENTRY,)


def one_table(rules: Any) -> dict[str, Any]:
    entry = {
        "layout": [2],
        "model": MODEL.to_dict(),
        "bandwidths": None,
        "tables": {"host": {"all_reduce": rules}},
    }
    return {"entries": [entry]}


def changed(path: Path, **facts: Any) -> None:
    write(path, ENTRY, HERE)
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, **facts}))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"version": 2}, "stale: it has version 2"),
        ({"format": "other"}, "no tuning"),
        ({"machine": {**HERE, "cpu": "Slide rule"}}, "cpu was 'Slide rule' and is 'Abacus'"),
        ({"machine": {**HERE, "library": "Open MPI v4"}}, "library was 'Open MPI v4'"),
        ({"machine": None}, "from another machine"),
        ({"machine": {**HERE, "gpus": 8}}, "it has more facts"),
        ({"entries": 3}, "no tuning"),
        ({"entries": [{}]}, "no tuning"),
        (one_table([]), "no tuning"),
        (one_table([[None, ["magic"]]]), "no algorithm"),
        (one_table([[10, ["ring"]]]), "do not cover all sizes"),
        (one_table([[-1, ["ring"]], [None, 5]]), "no tuning"),
        (one_table([["x", ["ring"]]]), "no tuning"),
        ({"entries": [{**one_table([[None, ["ring"]]])["entries"][0], "layout": "ab"}]}, "no"),
        ({"entries": [{**one_table([[None, ["ring"]]])["entries"][0], "bandwidths": [1]}]}, "no"),
        ({"entries": [{**one_table([])["entries"][0], "bandwidths": [1, math.inf]}]}, "no"),
        ({"entries": [{**one_table([])["entries"][0], "bandwidths": [1, math.nan]}]}, "no"),
    ],
)
def test_files_that_are_refused(path: Path, facts: dict[str, Any], reason: str) -> None:
    changed(path, **facts)
    with pytest.raises(ArgumentValueError, match=reason):
        read(path, HERE)


def test_what_is_no_tuning_is_not_overwritten(tmp_path: Path) -> None:
    text = tmp_path / "precious.txt"
    text.write_text("years of work")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (text, tmp_path, tmp_path / "bytes", text / "below", Path("/proc/none")):
        with pytest.raises(ArgumentValueError, match=r"not overwritten|cannot be written"):
            check_writable(path)
    check_writable(tmp_path / "new" / "file")
    write(tmp_path / "t", ENTRY, HERE)
    check_writable(tmp_path / "t")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bytes", "new", "precious.txt", "t"]
    large = tmp_path / "large"
    large.write_text(" " * (1 << 21))
    for path in (large, Path("/dev/zero")):
        with pytest.raises(ArgumentValueError, match="no file of less than 1 MiB"):
            read(path, HERE)


def test_a_named_file_must_be_good_one_in_its_place_need_not(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    place = default_path(home)
    assert place == tmp_path / ".config" / "pycomm" / "tuning.json"
    assert default_path({"XDG_CONFIG_HOME": "/etc/xdg"}) == Path("/etc/xdg/pycomm/tuning.json")
    assert find(home, "threads") == (None, None)
    write(place, ENTRY, machine("threads"))
    tuning, problem = find(home, "threads")
    assert problem is None
    assert tuning is not None
    assert tuning.entries == (ENTRY,)
    assert find({**home, "PYCOMM_TUNING": "off"}, "threads") == (None, None)
    tuning, problem = find(home, "another library")
    assert tuning is None
    assert "library was 'threads'" in str(problem)
    with pytest.raises(ArgumentValueError, match=r"PYCOMM_TUNING: .*another machine"):
        find({"PYCOMM_TUNING": str(place)}, "another library")
    for text in ("", "{", "[]"):
        place.write_text(text)
        with pytest.raises(ArgumentValueError, match="no tuning"):
            find({"PYCOMM_TUNING": str(place)}, "threads")
    with pytest.raises(ArgumentValueError, match="cannot be read: No such file"):
        find({"PYCOMM_TUNING": str(tmp_path / "none")}, "threads")


def test_ranks_adopt_what_rank_0_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, ENTRY, machine("threads"))
    write(
        path,
        Entry((1, 1), {"host": {"all_reduce": (Rule(EVERYTHING, ("binomial",)),)}}, MODEL),
        machine("threads"),
    )

    def run(comm: Communicator) -> list[str]:
        comm.tuned()
        x = np.ones(100)
        half = comm.split(comm.rank // 2)
        assert half is not None
        plans = [c.plan("all_reduce", x[:n]) for c in (comm, half) for n in (100, 1000)]
        assert plans[1]()[0] == comm.size
        return [plan.algorithm for plan in plans] + [plans[2].why]

    monkeypatch.setenv("PYCOMM_TUNING", str(path))
    # Two ranks on one host have an entry; four do not, but pairs that are split off do.
    pair = pycomm.run_local(2, lambda comm: comm.tuned().plan("all_reduce", np.ones(100)).algorithm)
    assert pair == ["ring"] * 2
    found = pycomm.run_local(4, run, timeout=20)[3]
    assert found[2] == "ring"
    assert found[4] == f"{path}, 800 bytes"
    spread = pycomm.run_local(
        2, lambda comm: comm.tuned().plan("all_reduce", np.ones(9)).algorithm, hosts=[0, 1]
    )
    assert spread == ["binomial"] * 2
    path.write_text("{}")
    with pytest.raises(ArgumentValueError, match="no tuning") as caught:
        pycomm.run_local(3, run, timeout=20)
    assert "PYCOMM_TUNING" in str(caught.value)
    monkeypatch.delenv("PYCOMM_TUNING")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(path.parent))
    place = path.parent / "pycomm" / "tuning.json"
    write(place, ENTRY, HERE)
    assert pycomm.run_local(2, lambda comm: comm.tuned().size, timeout=20) == [2, 2]
    assert "not tuned" in caplog.text


def test_rules_keep_an_algorithm_until_another_is_clearly_faster() -> None:
    sizes = [64, 256, 1024, 4096]
    times = [
        {"native": 1.0, "ring": 2.0},
        {"native": 1.0, "ring": 0.99},  # noise
        {"native": 1.0, "ring": 0.5},
        {"ring": 0.5},
    ]
    beyond = (Rule(5000, ("native",)), Rule(EVERYTHING, ("direct",)))
    assert tune.decide(sizes, times, beyond) == (
        Rule(512, ("native", "ring")),
        Rule(8192, ("ring",)),
        Rule(EVERYTHING, ("direct",)),  # nothing was measured there
    )


def test_registered_arrays_have_a_rule_where_others_take_another_road() -> None:
    sizes = [64, 256, 1024, 4096, 16384]
    times = [
        {"native": 1.0, "shared": 2.0, "registered": 2.0},
        {"native": 1.0, "shared": 2.0, "registered": 0.5},
        {"native": 1.0, "shared": 0.5, "registered": 0.2},  # "shared" takes them the same way
        {"native": 1.0, "direct": 0.5, "registered": 0.2},
        {"native": 0.4, "direct": 0.5, "registered": 0.2},
    ]
    assert tune.decide(sizes, times, ()) == (
        Rule(128, ("native", "shared")),
        Rule(512, ("registered", "native", "shared")),
        Rule(2048, ("shared", "native")),
        Rule(8192, ("registered", "direct", "native")),
        Rule(32768, ("registered", "native", "direct")),
    )


@pytest.mark.parametrize(
    "words",
    [["--collectives", "magic"], ["-e", "63"], ["-e", "big"], ["--what"], ["-o"], ["more"]],
)
def test_what_cannot_be_tuned(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentValueError):
        tune.parse(words, {"HOME": "/home/me"})
    assert main(["tune", *words]) == 2
    assert capsys.readouterr().err.count("pycomm:") == 1


def test_where_a_tuning_is_written() -> None:
    home = {"HOME": "/home/me"}
    options = tune.parse(["-e", "4K"], {**home, "PYCOMM_TUNING": "off"})
    assert options.path == Path("/home/me/.config/pycomm/tuning.json")
    assert options.sizes == (64, 256, 1024, 4096)
    assert tune.parse([], {**home, "PYCOMM_TUNING": "/a/b"}).path == Path("/a/b")
    assert tune.parse(["-o", "c"], {**home, "PYCOMM_TUNING": "/a/b"}).path == Path("c")
    for nowhere in ({}, {"HOME": ""}, {"HOME": "", "XDG_CONFIG_HOME": "relative"}):
        assert find(nowhere, "threads") == (None, None)
        with pytest.raises(ArgumentValueError, match="no home"):
            tune.parse([], nowhere)


@pytest.mark.parametrize("only", ["native", "ring"])
def test_tables_that_name_too_little_fall_back(
    only: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"all_reduce": (Rule(EVERYTHING, (only,)),)}
    write(path, Entry((2,), {"host": rule}, MODEL), machine("threads"))
    monkeypatch.setenv("PYCOMM_TUNING", str(path))

    def run(comm: Communicator) -> None:
        for dtype, op in (("i4", "avg"), ("f2", "sum"), ("f8", "sum")):
            x = np.full(5, comm.rank + 1, dtype)
            assert (comm.all_reduce(x, op=op) == (1 if op == "avg" else 3)).all()
        plan = comm.plan("all_reduce", np.ones(4, np.int32), op="avg")
        assert plan.algorithm == "one_shot"
        assert f"not {only}" in plan.why

    pycomm.run_local(2, run, timeout=20, deterministic=True)


def test_bandwidths_that_were_measured_cut_the_slices(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry((2, 2), {"host": {}}, MODEL, (3e9, 1e9, 3e9, 1e9))
    write(path, entry, machine("threads"))
    monkeypatch.setenv("PYCOMM_TUNING", str(path))

    def run(comm: Communicator) -> int | None:
        x = np.ones(4000)
        plan = comm.plan("all_reduce", x, algorithm="hierarchical")
        assert (plan() == comm.size).all()
        assert plan.schedule is not None
        assert plan.schedule.weights == (3000, 3000, 1000, 1000)
        assert plan.predicted_seconds is not None
        return plan.bytes_sent

    # A rank gives away the other's slice, half of its own twice across, and its own.
    sent = pycomm.run_local(4, run, timeout=20, hosts=[0, 0, 1, 1])
    assert sent == [8 * n for n in (1000 + 3000 + 3000, 3000 + 1000 + 1000) * 2]


def test_measuring_on_threads_gives_a_usable_entry(path: Path) -> None:
    lines: list[str] = []

    def run(comm: Communicator) -> Entry | None:
        say = lines.append if comm.rank == 0 else lambda _: None
        return tune.measure(comm, [64, 256], ["all_reduce", "all_gather"], say)

    for hosts, layout in (([0, 0, 0], (3,)), ([0, 1, 0], (2, 1))):
        entries = pycomm.run_local(3, run, timeout=60, hosts=hosts)
        assert entries[1:] == [None, None]
        entry = entries[0]
        assert entry.layout == layout
        write(path, entry, HERE)
        assert read(path, HERE).entry(layout) is not None
    assert len(lines) == 8
    assert "ring" in lines[0]
    assert "hierarchical" not in lines[0]
    assert "hierarchical" in lines[4]


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_built_in_table_is_whole(hosts: int, crowded: bool) -> None:
    table = built_in("host", hosts, crowded=crowded)
    assert set(table) == set(COLLECTIVES)
    for collective in COLLECTIVES:
        for nbytes in (0, 1, 10**4, 10**6, 10**9, 2**50):
            wanted = preferences(table, collective, nbytes)
            assert set(wanted) <= {"native", *SHARED, *names(collective)}
            assert wanted[-1] in names(collective)  # there is always something of pycomm's own
