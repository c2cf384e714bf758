"""Runs the checks for a machine with one GPU, each in processes of its own, each with a deadline.

``tests/gpu/run.sh --help``. A step that fails or hangs does not stop the others; of one that hangs,
every process's stack is printed. Everything goes into one JSON file. Exit codes: 0 all steps
passed or had a reason to be skipped, 1 some failed, 2 nothing can be checked here.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RANKS = 2
TOTAL = 470.0  # seconds
_END = 2.0  # seconds for stacks to be written

#: What lets two ranks share a device, and is decided by whoever starts this.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
}


@dataclass(frozen=True)
class Step:
    """What is run: ranks of ``steps.py`` or ``bandwidth.py``, or one pytest."""

    name: str
    limit: float
    words: tuple[str, ...] = ()
    ranks: int = RANKS
    needs: str | None = None  # a module of others, which is measured beside pycomm


@dataclass
class Outcome:
    """How it went."""

    name: str
    outcome: str
    seconds: float = 0.0
    told: Any = None
    output: list[str] = field(default_factory=list)


def steps(doubles: bool) -> list[Step]:
    """Return all steps, in the order in which they are worth the time."""
    pytest = (
        "-P",
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "gpu.plugin",
        "-p",
        "no:cacheprovider",
    )
    ours = str(HERE / "steps.py")
    measured = str(HERE / "bandwidth.py")
    device = "tests/device"
    return [
        Step("found", 60, (ours, "found"), 1),
        Step("compile", 90, (ours, "compile"), 1),
        Step("kernels", 90, (*pytest, f"{device}/test_device_kernels.py"), 0),
        Step("arrays", 60, (*pytest, f"{device}/test_device_arrays.py"), 0),
        *(
            Step(name, 60, (ours, name))
            for name in (
                "collectives",
                "algorithms",
                "compression",
                "streams",
                "graph",
                "split",
                "deadline",
                "missing",
            )
        ),
        Step("bandwidth:pycomm", 75, (measured, "pycomm")),
        Step("bandwidth:plan", 75, (measured, "plan")),
        *(
            Step(f"bandwidth:{name}", 75, (measured, name), RANKS, module)
            for name, module in (("nccl4py", "nccl.core"), ("cupy", "cupy"), ("torch", "torch"))
            if not doubles
        ),
    ]


def doubles_environment() -> dict[str, str]:
    """Compile the doubles; return what lets a process find them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from doubles.build import with_kernels

    return with_kernels().environment() | {
        "PYCOMM_GPU_DOUBLES": "1",
        "PYCOMM_DOUBLE_DELAY_US": os.environ.get("PYCOMM_DOUBLE_DELAY_US", "20"),
    }


def cache() -> dict[str, str]:
    """Return where compiled kernels are kept."""
    return {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(ROOT / "build" / "cache")}


def stage() -> Path:
    """Put the package together as an installation would; return the folder that holds it."""
    place = ROOT / "build" / "gpu-stage"
    shutil.rmtree(place, ignore_errors=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in settings["package-dir"].items():
        target = place.joinpath(*package.split("."))
        shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def run(step: Step, environ: Mapping[str, str], limit: float) -> Outcome:
    """Run a step, for at most `limit` seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pycomm-gpu-") as name:
        folder = Path(name)
        lines = [
            [sys.executable, *step.words, str(rank), str(step.ranks), name]
            for rank in range(step.ranks)
        ] or [[sys.executable, *step.words]]
        outputs = [folder / f"{rank}.out" for rank in range(len(lines))]
        processes = []
        for line, output in zip(lines, outputs, strict=True):
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        line,
                        cwd=ROOT,
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            late = wait(processes, begin + limit)
        finally:
            for process in processes:
                end(process)
        seconds = time.monotonic() - begin
        texts = [output.read_text(errors="replace") for output in outputs]
        told = [_read(folder / f"{rank}.json") for rank in range(step.ranks)]
    codes = [process.returncode for process in processes]
    outcome = "hung" if late else "passed" if not any(codes) else "failed"
    skips = {one["skip"] for one in told if one and "skip" in one}
    if outcome == "passed" and skips:
        return Outcome(step.name, "skipped", seconds, "; ".join(sorted(skips)))
    shown = (
        []
        if outcome == "passed"
        else [
            f"process {rank}, exit code {code}:\n{text.strip()[-6000:]}"
            for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
        ]
    )
    if not step.ranks:
        told = [(texts[0].strip().splitlines() or [""])[-1]]
    return Outcome(step.name, outcome, seconds, told, shown)


def wait(processes: list[subprocess.Popen[bytes]], moment: float) -> bool:
    """Wait for the ends; return whether it took too long. Then all have written their stacks."""
    failed: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed is None and any(process.poll() for process in processes):
            failed = now
        # The others of one that failed may wait for it for ever.
        if now > moment or (failed is not None and now > failed + 10):
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)  # faulthandler writes all stacks
            time.sleep(_END)
            return failed is None
        time.sleep(0.02)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _importable(module: str, environ: Mapping[str, str]) -> str | None:
    """Return why a module cannot be imported, None if it can; in a process of its own."""
    line = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"import {module} takes more than 60 s"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def main(argv: list[str]) -> int:
    """Run all steps, print how they went, and write the JSON file."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--doubles", action="store_true", help="on the doubles, without a GPU")
    parser.add_argument("--only", default="", help="names of steps, with commas between them")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds for all of it (470)")
    parser.add_argument("--hang", action="store_true", help="a step that hangs, to see its stacks")
    parser.add_argument("--json", help="where results go; $OUT/gpu.json or build/gpu.json")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    # As Ctrl-C does: an exception, so that the processes of the moment are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    all_steps = steps(options.doubles)
    if options.hang:
        all_steps.insert(1, Step("hang", 3, (str(HERE / "steps.py"), "hang")))
    wanted = set(filter(None, options.only.split(",")))
    unknown = wanted - {step.name for step in all_steps}
    if unknown:
        parser.error(f"no steps {sorted(unknown)}; there are {[one.name for one in all_steps]}")
    environ = {**SHARING, **os.environ, **cache(), "PYTHONUNBUFFERED": "1"}
    if options.doubles:
        if shutil.which("cc") is None:
            say("the doubles need a C compiler: cc")
            return 2
        environ |= doubles_environment()
    path = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = ":".join(path)
    if _importable("pycomm.algorithms", environ):  # not installed here
        environ["PYTHONPATH"] = ":".join([str(stage()), *path])
        if why := _importable("pycomm", environ):
            say(f"{sys.executable} cannot import pycomm, nor run it from this folder: {why}")
            return 2

    outcomes: list[Outcome] = []
    for step in all_steps:
        if wanted and step.name not in wanted | {"found"}:
            continue
        left = options.total - (time.monotonic() - begin)
        if left < 5:
            outcome = Outcome(step.name, "skipped", told="no time is left")
        elif (needs := step.needs or (None if step.ranks else "pytest")) and (
            why := _importable(needs, environ)
        ):
            outcome = Outcome(step.name, "skipped", told=why)
        else:
            outcome = run(step, environ, min(step.limit, left))
            if step.needs and outcome.outcome != "passed":
                outcome.outcome = "unable"  # which is no failure of pycomm
        outcomes.append(outcome)
        show(outcome)
        if step.name == "found" and outcome.outcome != "passed":
            break
    file = Path(options.json or Path(os.environ.get("OUT") or ROOT / "build") / "gpu.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "doubles": options.doubles,
        "seconds": round(time.monotonic() - begin, 1),
        "environment": {name: environ[name] for name in sorted(SHARING)},
        "steps": [vars(one) for one in outcomes],
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
    bad = [one.name for one in outcomes if one.outcome in ("failed", "hung")]
    say(f"{len(outcomes)} steps in {report['seconds']} s; not passed: {', '.join(bad) or 'none'}")
    say(f"written: {file}")
    if bad == ["found"]:
        return 2
    return 1 if bad else 0


def show(one: Outcome) -> None:
    """Print how a step went."""
    say(f"{one.outcome:<8}{one.name:<20}{one.seconds:6.1f} s  {_short(one.told)}")
    for text in one.output:
        say("    " + text.replace("\n", "\n    "))


def _short(told: Any) -> str:
    first = told[0] if isinstance(told, list) and told else told
    if isinstance(first, dict) and "rows" in first:
        last = first["rows"][-1] if first["rows"] else {}
        return f"{len(first['rows'])} sizes, the last: {json.dumps(last)}"
    return "" if first is None else first if isinstance(first, str) else json.dumps(first)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
