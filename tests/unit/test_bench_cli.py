import importlib.util
import io
import sys

import pycomm
from pycomm.bench import cli
from pycomm.bench.progress import Progress


def test_main_shows_help_and_errors(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr()
    assert "--minbytes" in shown.out
    assert shown.err == ""
    assert cli.main(["all_reduce", "-f", "1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: pycomm.bench")
    assert "1 is less than 2" in shown.err


def test_main_runs_alone(capsys):
    assert cli.main(["all_reduce", "-b", "64", "-e", "4K", "-f", "8", "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == 3


def test_main_passes_the_timeout_on_and_reports_failures(monkeypatch, capsys):
    seen = {}

    def init(**settings):
        seen.update(settings)
        raise pycomm.CommTimeoutError("nobody came")

    monkeypatch.setattr(pycomm, "init", init)
    assert cli.main(["all_reduce", "-T", "2.5"]) == 1
    assert seen == {"timeout": 2.5}
    assert capsys.readouterr().err == "pycomm.bench: CommTimeoutError: nobody came\n"
    seen.clear()
    assert cli.main(["all_reduce"]) == 1
    assert seen == {}
    monkeypatch.setattr(pycomm, "init", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["all_reduce"]) == 130


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_bar_needs_a_terminal_and_rank_0(monkeypatch):
    for stream, shown, drawn in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        progress = Progress(2, shown=shown)
        progress.step("all_reduce 8 bytes")
        progress.hide()
        assert ("all_reduce 8 bytes" in stream.getvalue()) is drawn


def test_without_rich_there_is_a_hint_and_no_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    progress = Progress(2, shown=True)
    progress.step("all_reduce 8 bytes")
    progress.hide()
    assert "pip install 'pycomm-collectives[bench]'" in stream.getvalue()
    assert "all_reduce" not in stream.getvalue()
