"""All probes of one host together, and the thread that runs them beside a program."""

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pycomm.errors import ArgumentTypeError, ArgumentValueError, describe
from pycomm.topology.graph import Host, Topology
from pycomm.topology.probes.infiniband import probe_infiniband
from pycomm.topology.probes.net import probe_net
from pycomm.topology.probes.nvml import XidEvents, probe_nvml
from pycomm.topology.probes.nvml_xids import needs_reset
from pycomm.topology.probes.pci import place, probe_pci, samples_of
from pycomm.topology.samples import Findings, check_sample

__all__ = ["HostProbe", "ProbeHost", "Prober", "probe_host"]

#: What looks at a host: ``probe(host, now) -> Findings``.
ProbeHost = Callable[[str, float], Findings]

# Looks that nobody has collected are kept up to this number, the latest ones.
_KEPT = 32
_PATIENCE = 2.0  # seconds to wait for a look that is under way


def probe_host(
    host: str,
    now: float,
    root: Path = Path("/sys"),
    nvml: Any = None,
    xids: Mapping[str, Sequence[int]] | None = None,
) -> Findings:
    """Return what is on this host and how it is: GPUs, NICs, and where they sit.

    Parameters
    ----------
    host : str
        The name of this host.
    now : float
        Seconds on a monotonic clock.
    root : Path
        Where sysfs is mounted.
    nvml : module, optional
        What to ask for GPUs instead of ``pynvml``.
    xids : mapping of str to sequence of int, optional
        What the driver has said of each GPU since the last look.
    """
    found = [
        probe_nvml(host, now, nvml, xids=xids),
        probe_infiniband(host, now, root),
        probe_net(host, now, root),
    ]
    topology = _united(host, [one.topology for one in found])
    bus_ids = [gpu.bus_id for gpu in topology.gpus if gpu.bus_id is not None]
    bus_ids += [nic.bus_id for nic in topology.nics if nic.bus_id is not None]
    tree = probe_pci(bus_ids, host, now, root)
    samples = chain.from_iterable(one.samples for one in found)
    return Findings(place(topology, tree), (*samples, *samples_of(topology, tree)))


class HostProbe:
    """`probe_host` again and again, with what the driver says of GPUs meanwhile.

    Parameters
    ----------
    root, nvml
        As for `probe_host`.
    """

    def __init__(self, root: Path = Path("/sys"), nvml: Any = None) -> None:
        self._root = root
        self._nvml = nvml
        self._events = XidEvents(nvml)
        self._events.register()
        # Those after which a GPU is of no use until it is reset, which ends this process as well.
        self._lasting: dict[str, list[int]] = {}

    def __call__(self, host: str, now: float) -> Findings:
        """Look once."""
        xids = {name: list(known) for name, known in self._lasting.items()}
        for name, xid in self._events.poll():
            xids.setdefault(name, []).append(xid)
            if needs_reset(xid):
                self._lasting.setdefault(name, []).append(xid)
        return probe_host(host, now, self._root, self._nvml, xids)

    def close(self) -> None:
        """Give back what NVML keeps for this."""
        self._events.close()


def _united(host: str, parts: Iterable[Topology]) -> Topology:
    """Return what different probes saw of one host as one topology."""
    parts = list(parts)
    known = next((one for part in parts for one in part.hosts), Host(host))
    return Topology(
        hosts=(replace(known, name=host),),
        switches=tuple(chain.from_iterable(part.switches for part in parts)),
        gpus=tuple(chain.from_iterable(part.gpus for part in parts)),
        nics=tuple(chain.from_iterable(part.nics for part in parts)),
        links=tuple(chain.from_iterable(part.links for part in parts)),
        unknown=tuple(chain.from_iterable(part.unknown for part in parts)),
        notes=tuple(chain.from_iterable(part.notes for part in parts)),
    )


def _of_host(findings: Findings, host: str) -> Findings:
    """Return what a probe found if it is of this host alone; a topology of nothing is that too."""
    if not isinstance(findings, Findings):
        raise ArgumentTypeError(f"a probe returns Findings, not {type(findings).__name__}")
    topology = findings.topology
    if not isinstance(topology, Topology) or not isinstance(findings.samples, tuple):
        raise ArgumentTypeError("findings are a Topology and a tuple of samples")
    for sample in findings.samples:
        check_sample(sample)
    pickle.dumps(findings)  # what cannot travel fails here, and not in a look of all ranks
    if topology == Topology():
        return replace(findings, topology=Topology(hosts=(Host(host),)))
    if [one.name for one in topology.hosts] != [host]:
        raise ArgumentValueError(f"a probe of {host} returns its topology, not that of others")
    return findings


class Prober:
    """Looks at this host: once at the start, then when it is told to, and every `interval`.

    Parameters
    ----------
    host : str
        The name of this host.
    probe : callable, optional
        What looks, instead of a `HostProbe`. If it raises, nothing is known of this host, and a
        note says why.
    interval : float, optional
        Seconds between looks in a thread of its own; no thread if None.
    share : float
        Of the thread's time that looks may take: it waits for longer between long ones.
    alive : callable, optional
        Whether anybody still wants to know: the thread ends if not.
    """

    def __init__(
        self,
        host: str,
        probe: ProbeHost | None,
        interval: float | None,
        share: float = 1.0,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._host = host
        self._share = share
        self._alive = alive
        self._own: HostProbe | None = None
        if probe is None:
            probe = self._own = HostProbe()
        self._probe = probe
        self._seen: deque[Findings] = deque(maxlen=_KEPT)
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self.look()
        self._thread: threading.Thread | None = None
        if interval is not None:
            self._thread = threading.Thread(
                target=self._run, args=(interval,), name="pycomm topology", daemon=True
            )
            self._thread.start()

    def look(self) -> None:
        """Look now."""
        # The thread may be at it; if that hangs, or is not there after a fork, nothing is seen.
        if not self._looking.acquire(timeout=_PATIENCE):
            return
        try:
            try:
                findings = _of_host(self._probe(self._host, time.monotonic()), self._host)
            except Exception as error:
                told = f"the probe of this host failed: {describe(error)}"
                findings = Findings(Topology(hosts=(Host(self._host),), notes=(told,)))
            self._seen.append(findings)
        finally:
            self._looking.release()

    def take(self) -> list[Findings]:
        """Return what was seen since the last time, oldest first."""
        taken = []
        while self._seen:
            taken.append(self._seen.popleft())
        return taken

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
        # A look that hangs in the kernel is left alone, with what it uses.
        if self._own is not None and self._looking.acquire(timeout=1.0):
            self._own.close()
            self._looking.release()

    def _run(self, interval: float) -> None:
        pause = interval
        while not self._stop.wait(min(pause, threading.TIMEOUT_MAX)) and self._alive():
            began = time.monotonic()
            self.look()
            pause = max(interval, (time.monotonic() - began) / self._share)
