"""Several hosts on one Linux machine, to try programs that run across hosts; needs root.

  hosts up N                     make the hosts h1 to hN (N at most 9) and the head h0
  hosts run -n R [OPTIONS] -- COMMAND...
                                 Open MPI's mpirun on the PATH, on h0: R ranks on every host;
                                 OPTIONS go to mpirun
  hosts exec I -- COMMAND...     one command on host I
  hosts shape RATE DELAY         links of RATE each way (1gbit, 200mbit, none) and DELAY between
                                 any two hosts, one way (0.2ms, 50us, 0); `shape none 0` undoes it
  hosts slow I RATE              the link of one host, each way, until the next shape or heal
  hosts cut I                    pull the cable of a host: it sees no carrier
  hosts heal I                   plug it in again, with the rate of the shape
  hosts bytes                    what every host has sent so far, in bytes: "h1 12345"
  hosts status                   addresses, processes, shape
  hosts check                    whether this machine can do it; says what is missing
  hosts down                     end every process on the hosts and remove everything

A host is a set of namespaces: network, hostname, mounts (with a /dev/shm, an /etc/hosts and a boot
id of its own), IPC and processes; TMPDIR is its own too. So ranks on two hosts share no memory, and
an MPI sees two machines. Files are shared. The head, where launchers run, has the process ids of
this machine: from inside of one host none could enter another. Links are veth pairs to one switch.

The rate is set where packets leave, by HTB on the host and TBF on the switch. For the delay a relay
takes the switch's place, compiled from _relay.c on first use; it adds about 0.1 ms of its own and
carries some Gbit/s. The kernel's netem is not needed.

Debian packages: iproute2, util-linux, mount, hostname; for a DELAY also gcc and libc6-dev.
Environment: PYCOMM_HOSTS is the folder that holds everything, /run/pycomm-hosts by default; sets of
hosts in different folders do not see each other. Inside of a host PYCOMM_HOST is its name.
"""

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["Hosts", "HostsError", "main", "why_not"]

HERE = Path(__file__).resolve().parent

# In the environment of the process that holds a host open: marks it as ours, whatever happens.
HOLDER = "PYCOMM_HOSTS_HOLDER"
SWITCH = "switch"
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
OWN_PROCESSES = ("--pid", "--mount-proc")
RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PATIENCE = 10.0  # seconds until something that takes milliseconds has failed
FRAME = 1514  # bytes of the longest frame on a link

# A process that holds namespaces open. It is process 1 of its host: there, children that nobody
# waits for are its own, and vanish at their end since it ignores them.
SWITCH_SCRIPT = """
echo ready
exec sleep infinity >/dev/null 2>&1
"""
HOST_SCRIPT = """
hostname "$0"
mount -n -t tmpfs tmpfs /dev/shm
mount -n -t sysfs sysfs /sys  # /sys/class/net shows the network of the mount
mount -n --bind "$1/../etc-hosts" /etc/hosts
cat /proc/sys/kernel/random/uuid >"$1/boot-id"
mount -n --bind "$1/boot-id" /proc/sys/kernel/random/boot_id
echo ready
exec env --ignore-signal=CHLD sleep infinity >/dev/null 2>&1
"""

# What Open MPI needs for hosts like these, unless the caller has set it.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "PRTE_MCA_prte_if_include": "eth0",
    # All daemons start from the head: a host has no way into another one.
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    # Every host believes to have all cores for itself.
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


class HostsError(Exception):
    """What could not be done, in words for the terminal."""


def parse(text: str, units: Mapping[str, float], nothing: str, example: str) -> int:
    """Return the number that a text like ``0.2ms`` stands for; 0 if it says `nothing`."""
    if text == nothing:
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if not found or found[2] not in units:
        raise HostsError(f"{example}, not {text!r}")
    return round(float(found[1]) * units[found[2]])


def why_not() -> str:
    """Return why this machine cannot have hosts; nothing if it can."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not found: {', '.join(missing)} (see --help for the packages)"
    tried = subprocess.run(  # noqa: S603  # fixed
        ["unshare", *NAMESPACES, *OWN_PROCESSES, "--fork", "true"],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return "" if tried.returncode == 0 else f"namespaces are not allowed: {tried.stderr.strip()}"


def address(index: int) -> str:
    """Return the address of a host, of a network set aside for benchmarks (RFC 2544)."""
    return f"198.18.0.{10 + index}"


class Hosts:
    """The hosts that belong to one folder.

    Attributes
    ----------
    folder : Path
        Holds ``count`` (how many hosts; made first, removed last), ``shape`` if there is one, and
        for each host and the switch a folder with the process id of its holder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._mark = f"{HOLDER}={self.folder}".encode()

    # ----------------------------------------------------------------------------- up and down

    def up(self, count: int) -> None:
        """Make `count` hosts and the head; all of them or none."""
        if not 1 <= count <= 9:
            raise HostsError(f"there can be 1 to 9 hosts, not {count}")
        if reason := why_not():
            raise HostsError(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise HostsError(f"{self.folder} is in use: `hosts down` first")
        (self.folder / "count").write_text(str(count))
        # As Ctrl-C does: an exception, so that nothing stays behind.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            self._build(count)
        except BaseException:
            self.down()
            raise

    def _build(self, count: int) -> None:
        names = [f"h{index}" for index in range(count + 1)]
        lines = [f"{address(index)} {name}" for index, name in enumerate(names)]
        (self.folder / "etc-hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._write_agent()
        self._hold(SWITCH, ["--net"], SWITCH_SCRIPT)
        self._net(SWITCH, "ip", "link add br0 type bridge", "link set br0 up")
        for index, name in enumerate(names):
            own = OWN_PROCESSES if index > 0 else ()
            self._hold(name, [*NAMESPACES, *own], HOST_SCRIPT)
            # The relay finds the port of a frame by the last byte of its address.
            peer = f"eth0 address 02:00:00:00:00:0{index} netns {self._holder(name)}"
            port = f"p{index}"
            self._net(SWITCH, "ip", f"link add {port} type veth peer name {peer}")
            self._net(SWITCH, "ip", f"link set {port} master br0 up")
            self._net(name, "ip", f"addr add {address(index)}/24 dev eth0")
            self._net(name, "ip", "link set lo up", "link set eth0 up")

    def down(self) -> None:
        """End every process on the hosts and remove the folder; also after half an `up`."""
        holders = [self._process(record.parent.name) for record in self.folder.glob("*/pid")]
        # Only of holders that are ready: another one is in the network of its caller still.
        networks = {network_of(pid) for pid in holders if pid} - {None, network_of(os.getpid())}
        deadline = time.monotonic() + PATIENCE
        while members := [
            pid
            for pid in processes()
            if network_of(pid) in networks or self._mark in environment_of(pid)
        ]:
            if time.monotonic() > deadline:
                raise HostsError(f"processes do not end: {members}")
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        if (self.folder / "count").exists():  # else it is not ours
            shutil.rmtree(self.folder)

    def _hold(self, name: str, namespaces: list[str], script: str) -> None:
        """Start the process that holds the namespaces of `name` open."""
        folder = self.folder / name
        (folder / "tmp").mkdir(parents=True)
        # The parent stays, and its environment can be read at any time: a shell that becomes
        # another program has none for a moment.
        fork = ("--fork", "--kill-child")
        line = ["unshare", *namespaces, *fork, "sh", "-euc", script, name, str(folder)]
        self._start(name, line)

    def _start(self, name: str, line: list[str]) -> None:
        """Start a process that stays, and wait until it says that it is ready."""
        log = self.folder / name / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(  # noqa: S603  # built here
                line,
                env=os.environ | {HOLDER: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is not for it
            )
        assert process.stdout is not None
        try:
            with process.stdout as output:
                ready, _, _ = select.select([output], [], [], PATIENCE)
                if not ready or output.readline() != b"ready\n":
                    raise HostsError(f"{name} does not start: {log.read_text().strip()}")
            (self.folder / name / "pid").write_text(str(process.pid))
        except BaseException:
            process.kill()
            process.wait()
            raise

    def _write_agent(self) -> None:
        """Write the program that mpirun calls as it would call ssh."""
        agent = self.folder / "agent"
        words = [f"PYCOMM_HOSTS={self.folder}", sys.executable, str(HERE / "_hosts.py"), "ssh"]
        agent.write_text(f'#!/bin/sh\nexec env {shlex.join(words)} "$@"\n')
        agent.chmod(0o755)

    # ---------------------------------------------------------------------------- on the hosts

    @property
    def count(self) -> int:
        """How many hosts there are, the head not counted."""
        try:
            return int((self.folder / "count").read_text())
        except FileNotFoundError:
            raise HostsError("there are no hosts: `hosts up N` first") from None

    def become(self, index: int, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Turn this process into a command on a host."""
        self._check(index)
        name = f"h{index}"
        holder = self._holder(name)
        own = (f"--pid=/proc/{holder}/ns/pid_for_children",) if index > 0 else ()
        enter = ["nsenter", "-t", str(holder), *NAMESPACES, *own, f"--wd={Path.cwd()}", "--"]
        here = {"TMPDIR": str(self.folder / name / "tmp"), "PYCOMM_HOST": name}
        os.execvpe(enter[0], [*enter, *argv], {**environ, **here})  # noqa: S606  # what was asked

    def run(self, ranks: int, options: Sequence[str], argv: Sequence[str]) -> None:
        """Turn this process into `mpirun` on the head, with `ranks` ranks on every host."""
        if ranks < 1:
            raise HostsError(f"-n is at least 1, not {ranks}")
        mpirun = shutil.which("mpirun")
        if mpirun is None:
            raise HostsError("no mpirun on the PATH")
        wanted = {**OPEN_MPI, "PRTE_MCA_plm_ssh_agent": str(self.folder / "agent")}
        total = ranks * self.count
        if total > len(os.sched_getaffinity(0)):
            # A host does not know of the ranks on the others, and would let its own spin.
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        slots = ",".join(f"h{index}:{ranks}" for index in range(1, self.count + 1))
        line = [mpirun, "--host", slots, "-n", str(total), *options, *argv]
        # Where ranks go is said by the command alone.
        mapping = "PRTE_MCA_rmaps_default_mapping_policy"
        self.become(0, line, wanted | os.environ | {mapping: wanted[mapping]})

    def sent(self) -> Iterator[str]:
        """Yield for each host how many bytes have left by its eth0."""
        for name in self._names():
            table = Path(f"/proc/{self._holder(name)}/net/dev").read_text()
            sent = table.partition("eth0:")[2].split()[8]
            yield f"{name} {sent}"

    def status(self) -> Iterator[str]:
        """Yield lines that say what there is."""
        names = self._names()
        shape = self.folder / "shape"
        yield f"{self.folder}, shape {shape.read_text() if shape.exists() else 'none 0'}"
        for index, name in enumerate(names):
            holder = self._holder(name)
            number = [network_of(pid) for pid in processes()].count(network_of(holder))
            yield f"{name} {address(index)} holder {holder} processes {number}"

    def _names(self) -> list[str]:
        return [f"h{index}" for index in range(self.count + 1)]

    def _holder(self, name: str) -> int:
        pid = self._process(name)
        if pid is None:
            raise HostsError(f"{name} is gone: `hosts down`, then `hosts up N`")
        return pid

    def _process(self, name: str) -> int | None:
        """Return the id of a process that `_start` has started, if it runs."""
        record = self.folder / name / "pid"
        if not record.exists():
            return None
        pid = int(record.read_text())  # which may be another process by now
        return pid if self._mark in environment_of(pid) else None

    # -------------------------------------------------------------------------------- the links

    def shape(self, rate: str, delay: str) -> None:
        """Give all links a rate and a delay."""
        delays = {"us": 1e3, "ms": 1e6, "s": 1e9}
        bits = parse(rate, RATES, "none", "RATE is like 1gbit, 200mbit or none")
        nanoseconds = parse(delay, delays, "0", "DELAY is like 0.2ms, 50us or 0")
        names = self._names()
        if nanoseconds:
            self._compile()
        if relay := self._process("relay"):
            os.kill(relay, signal.SIGKILL)
        for index in range(len(names)):
            self._limit(index, bits, inwards=not nanoseconds)
            bridge = "nomaster" if nanoseconds else "master br0"
            self._net(SWITCH, "ip", f"link set p{index} {bridge}")
        if nanoseconds:
            enter = ["nsenter", "-t", str(self._holder(SWITCH)), "--net"]
            ports = [f"p{index}" for index in range(len(names))]
            relay_program = str(self.folder / "relay" / "relay")
            self._start("relay", [*enter, relay_program, str(nanoseconds), str(bits), *ports])
        (self.folder / "shape").write_text(f"{rate} {delay}")

    def _limit(self, index: int, bits: int, *, inwards: bool) -> None:
        """Give the link of a host a rate, on its way out, and on its way in if the relay does not.

        0 bits a second are as many as this machine can.
        """
        name, port = f"h{index}", f"p{index}"
        self._net(name, "tc", "qdisc del dev eth0 root", strict=False)
        self._net(SWITCH, "tc", f"qdisc del dev {port} root", strict=False)
        if not bits:
            return
        # What may leave at once: what the wire carries while a timer is late, at least one frame.
        burst = max(bits // 8 // 50_000, FRAME + 100)
        limit = f"{bits}bit burst {burst} cburst {burst} quantum 60000"
        self._net(name, "tc", "qdisc add dev eth0 root handle 1: htb default 1")
        self._net(name, "tc", f"class add dev eth0 parent 1: classid 1:1 htb rate {limit}")
        if inwards:
            # When several hosts send to one: its way in has a rate too, and a limited queue.
            queue = f"tbf rate {bits}bit burst 70kb limit 4mb"
            self._net(SWITCH, "tc", f"qdisc add dev {port} root {queue}")

    def slow(self, index: int, rate: str) -> None:
        """Give the link of one host another rate, in both directions."""
        self._check(index)
        self._limit(
            index, parse(rate, RATES, "none", "RATE is like 1gbit or 200mbit"), inwards=True
        )

    def cut(self, index: int) -> None:
        """Pull the cable of a host."""
        self._check(index)
        self._net(SWITCH, "ip", f"link set p{index} down")

    def heal(self, index: int) -> None:
        """Plug the cable of a host in again, with the rate that all links have."""
        self._check(index)
        shape = self.folder / "shape"
        rate, delay = shape.read_text().split() if shape.exists() else ("none", "0")
        self._limit(index, parse(rate, RATES, "none", ""), inwards=delay == "0")
        self._net(SWITCH, "ip", f"link set p{index} up")

    def _check(self, index: int) -> None:
        if not 0 <= index <= self.count:
            raise HostsError(f"there is no host {index}")

    def _compile(self) -> None:
        """Make the program of the relay."""
        relay = self.folder / "relay" / "relay"
        if relay.exists():
            return
        compiler = shutil.which("cc")
        if compiler is None:
            raise HostsError("a DELAY needs a C compiler: no cc found (gcc, libc6-dev)")
        relay.parent.mkdir(exist_ok=True)
        line = [compiler, "-O2", "-o", str(relay), str(HERE / "_relay.c")]
        told = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
        if told.returncode != 0:
            raise HostsError(f"the relay does not compile:\n{told.stderr}")

    def _net(self, name: str, program: str, *lines: str, strict: bool = True) -> None:
        """Run lines of `ip` or `tc` in the network of a host or the switch."""
        told = subprocess.run(  # noqa: S603  # built here
            ["nsenter", "-t", str(self._holder(name)), "--net", program, "-batch", "-"],  # noqa: S607
            input="\n".join([*lines, ""]),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if strict and told.returncode != 0:
            raise HostsError(f"{program} on {name}: {told.stderr.strip()}")


# -------------------------------------------------------------------------------------- processes


def processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def network_of(pid: int) -> str | None:
    """Return the network namespace a process is in; None if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115  # no file of that name exists
    except OSError:
        return None


def environment_of(pid: int) -> list[bytes]:
    """Return the environment that a process was started with; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


# ----------------------------------------------------------------------------------- command line


def say(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("\n".join([*lines, ""]))


def command(words: Sequence[str]) -> None:
    """Do what a command line says."""
    hosts = Hosts(Path(os.environ.get("PYCOMM_HOSTS") or "/run/pycomm-hosts"))
    match list(words):
        case ["up", count] if count.isdecimal():
            hosts.up(int(count))
        case ["down"]:
            hosts.down()
        case ["status"]:
            say(*hosts.status())
        case ["bytes"]:
            say(*hosts.sent())
        case ["check"]:
            if reason := why_not():
                raise HostsError(reason)
        case ["shape", rate, delay]:
            hosts.shape(rate, delay)
        case ["slow", index, rate] if index.isdecimal():
            hosts.slow(int(index), rate)
        case ["cut", index] if index.isdecimal():
            hosts.cut(int(index))
        case ["heal", index] if index.isdecimal():
            hosts.heal(int(index))
        case ["exec", index, "--", _, *_] if index.isdecimal():
            hosts.become(int(index), words[3:], os.environ)
        case ["run", "-n", ranks, *rest] if ranks.isdecimal() and "--" in rest[:-1]:
            split = rest.index("--")
            hosts.run(int(ranks), rest[:split], rest[split + 1 :])
        case ["ssh", host, _, *_] if re.fullmatch(r"h\d", host):  # mpirun's agent; as ssh does
            hosts.become(int(host[1:]), ["sh", "-c", " ".join(words[2:])], os.environ)
        case ["help" | "-h" | "--help"]:
            say(str(__doc__).strip())
        case _:
            raise HostsError("what to do? `hosts --help` tells")


def main(argv: Sequence[str]) -> int:
    """Run one command; 1 if it failed."""
    try:
        command(argv)
    except HostsError as error:
        sys.stderr.write(f"hosts: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
