"""Record the facts of older versions of NCCL; called by scripts/record-abi."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import abi


def record(version: str) -> None:
    """Write the facts of one version, out of its wheel on PyPI."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        subprocess.run([*line, f"nvidia-nccl-cu12=={version}"], check=True)  # noqa: S603
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            header = wheel.extract("nvidia/nccl/include/nccl.h", folder)
            library = wheel.extract("nvidia/nccl/lib/libnccl.so.2", folder)
        # Its header first: the one of the environment has the same name.
        include = [Path(header).parent, *abi.include_folders()]
        declared = abi.read_header(include, "nccl")
        facts = {"version": version, **abi.measure(declared, folder, include)}
        symbols = subprocess.run(  # noqa: S603
            ["nm", "-D", "--defined-only", library],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        )
        names = {line.split()[-1].split("@")[0] for line in symbols.stdout.splitlines()}
        facts["exported"] = sorted(name for name in names if name.startswith("nccl"))
    major, minor, *_ = version.split(".")
    target = abi.FACTS / f"nccl-{major}.{minor}.json"
    text = json.dumps(facts, indent=1, sort_keys=True)
    # A field, a list of three, on one line.
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\"[^\"]*\")\s+\]", r"[\1, \2, \3]", text)
    target.write_text(text + "\n")
    sys.stdout.write(f"{target}: {len(facts['functions'])} functions\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="such as 2.27.7")
    for one in parser.parse_args().versions:
        record(one)
