"""The command `pycomm topo`: what it reads, prints, writes and refuses."""

import json
import subprocess
import sys
import threading
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from support.topologies import bare_host, bare_hosts, cube_mesh, nvswitch_node, three_hosts

import pycomm
from pycomm import topo
from pycomm.cli import main
from pycomm.topology import read_xml, write_xml
from pycomm.topology.graph import State, Topology
from pycomm.topology.probes.ras import RasCommunicator, RasRank, RasStatus, ras_lines
from pycomm.topology.samples import Findings, Sample
from pycomm.topology.show import to_text

SMI = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tNV4\t0-3\t0\nGPU1\tNV4\tX\t0-3\t0\n"
NOBODY = RasStatus(reason="no answer from 127.0.0.1:28028: Connection refused")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher and no NCCL around this test."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "NCCL_TOPO_DUMP_FILE"):
        monkeypatch.delenv(name, raising=False)


def options(*words: str) -> Namespace:
    parser = ArgumentParser()
    topo.add_arguments(parser)
    return parser.parse_args(list(words))


def looks(*found: Topology | Findings):
    """Return a probe that sees one thing after the other, and then the last one again."""
    queue = [one if isinstance(one, Findings) else Findings(one) for one in found]

    def probe(host: str, now: float) -> Findings:
        seen = queue.pop(0) if len(queue) > 1 else queue[0]
        whole = seen.topology
        hosts = (replace(whole.hosts[0], name=host),)
        renamed = replace(
            whole,
            hosts=hosts,
            numa_nodes=tuple(replace(one, host=host) for one in whole.numa_nodes),
            switches=tuple(replace(one, host=host) for one in whole.switches),
            gpus=tuple(replace(one, host=host) for one in whole.gpus),
            nics=tuple(replace(one, host=host) for one in whole.nics),
        )
        return Findings(renamed, seen.samples)

    return probe


class TestFiles:
    @pytest.mark.parametrize("kind", ["xml", "smi", "json", "ours", "snapshot", "utf-16"])
    def test_kinds_are_told_by_content(self, kind, tmp_path, capsys):
        node = nvswitch_node()
        file = tmp_path / "node1"
        text, encoding = SMI, "utf-8"
        if kind == "xml":
            text = write_xml(node)
        elif kind == "json":
            text = node.to_json()
        elif kind == "ours":
            (tmp_path / "first").write_text(node.to_json())
            assert main(["topo", "--from", str(tmp_path / "first"), "--json"]) == 0
            text = capsys.readouterr().out
        elif kind == "snapshot":
            text = three_hosts().to_json()
        elif kind == "utf-16":
            encoding = "utf-16"
        file.write_text(text, encoding=encoding)
        assert main(["topo", "--from", str(file)]) == 0
        out = capsys.readouterr().out
        if kind in ("json", "ours"):
            assert out == to_text(node) + "\n"
        else:
            assert "node1: " in out

    def test_several_files_are_hosts_named_after_them(self, tmp_path, capsys):
        (tmp_path / "other").mkdir()
        files = [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "other" / "a.txt"]
        for file in files:
            file.write_text(SMI)
        words = [word for file in files for word in ("--from", str(file))]
        assert main(["topo", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["groups"]["nvlink"] == [
            [f"{host}:GPU0", f"{host}:GPU1"] for host in ("a", "b", "a#2")
        ]
        assert main(["topo", *words, "--host", "b"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("b: 2 GPUs")
        assert "a#2" not in out

    def test_standard_input(self, capsys):
        answer = subprocess.run(
            [sys.executable, "-m", "pycomm", "topo", "--from", "-", "--json"],
            input=SMI, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["groups"]["nvlink"] == [["GPU0", "GPU1"]]

    def test_xml_and_plot_are_written(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        file, xml, picture = (tmp_path / name for name in ("node1.json", "x.xml", "x.svg"))
        file.write_text(nvswitch_node().to_json())
        words = ["topo", "--from", str(file), "--json"]
        assert main([*words, "--xml", str(xml), "--plot", str(picture)]) == 0
        said = capsys.readouterr()
        json.loads(said.out)
        assert said.err == f"wrote {xml}\nwrote {picture}\n"
        assert read_xml(xml.read_text()).gpus[0].bus_id == "0000:10:00.0"
        assert picture.stat().st_size > 1000
        assert main(["topo", "--from", str(file), "--xml", "-"]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("<system")
        assert said.err == ""


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "told"),
        [
            (b"", "it is empty"),
            (b"\x00\x1b[31mELF\x07", "no header row that names GPUs"),
            (b"<system version='1'>", "x.txt"),
            (b"<html></html>", "<html>, where a topology starts with <system>"),
            (b'{"format": 1', "not JSON, or cut off"),
            (b'{"some": "thing"}', "JSON, but no topology of pycomm"),
            (b'{"format": 99}', "not one of format 1"),
            (b"GPU0\tX\tNV4\n", "comes before any header row"),
        ],
    )
    def test_files_that_are_nothing(self, data, told, tmp_path, capsys):
        file = tmp_path / "x.txt"
        file.write_bytes(data)
        assert main(["topo", "--from", str(file)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("pycomm: ")
        assert told in said.err
        assert said.err.count("\n") == 1
        assert said.err[:-1].isprintable()

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--from", "/nowhere/x.xml"], "/nowhere/x.xml: No such file or directory"),
            (["--from", "/"], "/: Is a directory"),
            (["--watch", "--from", "x"], "leave out --from"),
            (["--watch", "1", "--plot", "x.png"], "leave out --plot"),
            (["--ras", "--json"], "--ras is about this host"),
            (["--xml", "-", "--json"], "leave out one"),
            (["--from", "-", "--from", "-"], "read once only"),
            (["--plot", "x.jpg"], "must end in .png, .svg, .pdf"),
            (["--host", "nobody"], "there is no host 'nobody'; known: "),
            (["--xml", "/nowhere/x.xml"], "/nowhere/x.xml: No such file or directory"),
        ],
    )
    def test_arguments(self, words, told, capsys):
        assert main(["topo", *words]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert (said.out, said.err.count("\n")) == ("", 1)

    @pytest.mark.parametrize("words", [["--watch", "0"], ["--watch", "x"], ["more"]])
    def test_the_command_line(self, words, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["topo", *words])
        assert caught.value.code == 2
        assert "usage: pycomm topo" in capsys.readouterr().err

    def test_xml_of_several_hosts_or_without_places(self, tmp_path, capsys):
        several, matrix = tmp_path / "several", tmp_path / "matrix"
        several.write_text(bare_hosts().to_json())
        matrix.write_text(SMI)
        assert main(["topo", "--from", str(several), "--xml", "-"]) == 2
        assert "--host, one of alpha, beta" in capsys.readouterr().err
        assert main(["topo", "--from", str(several), "--xml", "-", "--host", "beta"]) == 0
        assert 'name="eth0"' in capsys.readouterr().out
        assert main(["topo", "--from", str(matrix), "--xml", "-"]) == 2
        assert "PCI" in capsys.readouterr().err

    def test_no_matplotlib_is_exit_code_1(self, monkeypatch, capsys):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["topo", "--plot", "x.png"]) == 1
        assert "pip install 'pycomm-collectives[bench]'" in capsys.readouterr().err

    def test_help(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["topo", "--help"])
        assert caught.value.code == 0
        assert "NCCL_TOPO_DUMP_FILE" in capsys.readouterr().out


def test_the_links_of_a_matrix(tmp_path, capsys):
    matrix, links = tmp_path / "node.txt", tmp_path / "links.txt"
    matrix.write_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n")
    up = "".join(f"\t Link {number}: 14.062 GB/s\n" for number in range(4))
    down = up.replace("Link 2: 14.062 GB/s", "Link 2: <inactive>")
    links.write_text(
        f"GPU 0: NVIDIA RTX A6000 (UUID: GPU-0)\n{up}GPU 1: NVIDIA RTX A6000 (UUID: GPU-1)\n{down}"
    )
    assert main(["topo", "--from", str(matrix), "--nvlink", str(links), "--json"]) == 0
    health = json.loads(capsys.readouterr().out)["health"]
    assert health["GPU0"]["state"] == "up"
    assert health["GPU1"]["state"] == "degraded"
    links.write_text("no such thing")
    assert main(["topo", "--from", str(matrix), "--nvlink", str(links)]) == 2
    assert str(links) in capsys.readouterr().err
    assert main(["topo", "--nvlink", str(links)]) == 2
    assert "belongs to one file" in capsys.readouterr().err


class TestThisHost:
    def test_one_look(self, capsys, tmp_path, monkeypatch):
        dump = tmp_path / "dump.xml"
        monkeypatch.setenv("NCCL_TOPO_DUMP_FILE", str(dump))
        sample = Sample("gpu1", "nvml", 0.0, State.DOWN, "fell off the bus (Xid 79)")
        probe = looks(Findings(nvswitch_node(), (sample,)))
        assert topo.local(options(), probe, ask=lambda *_, **__: 1 / 0) == 0
        out = capsys.readouterr().out
        assert "  down      gpu1: fell off the bus (Xid 79)" in out
        assert "--from" not in out
        assert "NCCL RAS" not in out
        dump.touch()
        status = RasStatus(reason="what listens at 127.0.0.1:28028 is not NCCL")
        assert topo.local(options("--ras"), probe, ask=lambda *_, **__: status) == 0
        out = capsys.readouterr().out
        told = f"- NCCL has written what it found: pycomm topo --from {dump}"
        assert told in " ".join(out.split())  # long paths begin a line of their own
        assert out.endswith(
            "\n\nNCCL RAS\n  unknown: what listens at 127.0.0.1:28028 is not NCCL\n"
        )

    def test_a_probe_that_fails_is_a_note(self, capsys):
        def probe(host, now):
            raise OSError("no sysfs")

        assert topo.local(options("--json"), probe) == 0
        assert "no sysfs" in json.loads(capsys.readouterr().out)["notes"][0]

    def test_where_nccl_is_asked(self, monkeypatch, capsys):
        asked = []

        def ask(address, *, timeout):
            asked.append((address, timeout))
            return NOBODY

        for value in ("", "10.0.0.7:4711", "localhost:99", "nonsense"):
            monkeypatch.setenv("NCCL_RAS_ADDR", value)
            topo.local(options("--ras"), looks(cube_mesh()), ask=ask)
        assert [address for address, _ in asked] == [
            ("127.0.0.1", 28028), ("10.0.0.7", 4711), ("127.0.0.1", 99), ("127.0.0.1", 28028),
        ]  # fmt: skip
        assert asked[0][1] == 12.0
        assert "unknown: no answer from" in capsys.readouterr().out
        monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
        topo.local(options("--ras"), looks(cube_mesh()), ask=ask)
        topo.local(options(), looks(cube_mesh()), ask=ask)
        assert len(asked) == 4
        assert "NCCL_RAS_ENABLE=0" in capsys.readouterr().out

    def test_what_nccl_says(self):
        ranks = (RasRank(0), RasRank(1, missing=True), RasRank(2, error=6), RasRank(3, dead=True))
        status = RasStatus(
            "2.28.9", (RasCommunicator("0xa", 4, ranks), RasCommunicator("0xb", 2)), 1, ("odd",)
        )
        assert ras_lines(status) == [
            "NCCL RAS",
            "  NCCL 2.28.9",
            "  communicator 0xa, 4 ranks: ranks 1 missing; ranks 3 silent; ranks 2 with errors",
            "  communicator 0xb, 2 ranks: all answer",
            "  1 processes did not answer NCCL in time",
            "  note: odd",
        ]
        assert ras_lines(None) == []

    def test_watching_with_hysteresis(self, capsys):
        up = Sample("eth0", "net", 0.0, State.UP)
        down = replace(up, state=State.DOWN, reason="no carrier")
        seen = [Findings(bare_host("x"), (one,)) for one in (up, up, down, up, up, up)]
        waited = []

        def wait(seconds):
            waited.append(seconds)
            if len(waited) > 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            topo.local(options("--watch", "2"), looks(*seen), wait)
        assert waited == [2.0] * 7
        lines = capsys.readouterr().out.split("\n")
        told = [line[10:] for line in lines if "eth0: up" in line or "eth0: down" in line]
        assert told == [
            "NIC eth0: up -> down: no carrier",
            "NIC eth0: down -> up: well again after 3 good looks in a row",
        ]

    def test_watching_in_json_is_a_line_for_each_change(self, capsys):
        first = bare_host("x")
        second = replace(first, nics=())
        waits = iter([None, None])

        def wait(seconds):
            if next(waits, 0) == 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            topo.local(options("--watch", "--json"), looks(first, first, second), wait)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["changes"] for line in lines] == [[], ["NIC eth0 is gone"]]
        assert lines[1]["nics"] == []

    def test_ctrl_c_is_exit_code_130(self, monkeypatch, capsys):
        def interrupted(seconds):
            raise KeyboardInterrupt

        monkeypatch.setattr(topo, "local", lambda options: interrupted(1))
        assert main(["topo", "--watch"]) == 130

    def test_python_m_pycomm_topo(self):
        answer = subprocess.run(
            [sys.executable, "-m", "pycomm", "topo", "--json"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        told = json.loads(answer.stdout)
        assert {"groups", "nearest_nic", "direct_pairs", "unknown", "links", "health"} <= set(told)


class TestTogether:
    def test_two_ranks(self, capsys):
        probe = looks(bare_host("x"))
        told = pycomm.run_local(2, lambda comm: topo.together(comm, options(), probe), hosts=[0, 1])
        assert told == [None, None]
        out = capsys.readouterr().out
        assert out.count("2 ranks on 2 hosts, epoch 1, hash ") == 1
        assert "Bandwidth in one direction, GB/s" in out
        assert out.count("NIC Legend:") == 2

    def test_json_of_two_ranks(self, capsys):
        pycomm.run_local(
            2, lambda comm: topo.together(comm, options("--json"), looks(bare_host("x")))
        )
        told = json.loads(capsys.readouterr().out)
        assert [one["rank"] for one in told["ranks"]] == [0, 1]
        assert told["epoch"] == 1

    def test_what_is_wrong_is_told_to_all(self, capsys):
        words = options("--host", "nobody")
        told = pycomm.run_local(2, lambda comm: topo.together(comm, words, looks(bare_host("x"))))
        assert told[0] == told[1]
        assert "there is no host 'nobody'" in told[0]
        assert capsys.readouterr().out == ""

    def test_watching_as_a_job(self, capsys):
        down = Sample("eth0", "net", 0.0, State.DOWN, "no carrier")
        probe = looks(bare_host("x"), Findings(bare_host("x"), (down,)))
        turns: dict[int, int] = {}

        def wait(seconds: float) -> None:
            rank = threading.get_ident()
            turns[rank] = turns.get(rank, 0) + 1
            if turns[rank] > 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pycomm.run_local(
                2, lambda comm: topo.together(comm, options("--watch", "1"), probe, wait)
            )
        out = capsys.readouterr().out
        assert out.count("eth0: up -> down: no carrier") == 1
        assert "2 ranks on 1 host" in out

    def test_a_job_of_one_rank(self, monkeypatch, capsys):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
        assert main(["topo"]) == 0
        assert capsys.readouterr().out.startswith("1 rank on 1 host, epoch 1")
        assert main(["topo", "--host", "nobody"]) == 2
        assert "there is no host 'nobody'" in capsys.readouterr().err

    def test_other_ranks_do_not_print_files(self, monkeypatch, capsys, tmp_path):
        file = tmp_path / "a"
        file.write_text(SMI)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        for rank in ("0", "1"):
            monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
            assert main(["topo", "--from", str(file)]) == 0
            assert bool(capsys.readouterr().out) == (rank == "0")


def test_the_pictures_of_the_documentation_are_what_the_script_draws(tmp_path):
    pytest.importorskip("matplotlib")
    root = Path(__file__).resolve().parents[2]
    for name in ("topology_node.png", "topology_hosts.png"):
        assert (root / "docs" / name).stat().st_size < 200 << 10
    examples = root / "docs" / "examples"
    file = tmp_path / "node.svg"
    subprocess.run([sys.executable, examples / "topology_picture.py", file], check=True, timeout=60)
    assert file.stat().st_size > 1000
    # The example that draws hosts, on one.
    watch = [examples / "topology_watch.py", "--seconds", "0.1", "--plot", tmp_path / "job.svg"]
    subprocess.run([sys.executable, *watch], check=True, timeout=60)
    assert (tmp_path / "job.svg").stat().st_size > 1000
