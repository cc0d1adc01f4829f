"""What a relay adds to the way of a KV cache, and what it takes: one publisher, a relay, many subscribers.

    python benchmarks/relay.py

Each row is processes on this machine over the loopback interface: a publisher with a whole cache, in all rows
but the first `python -m moqt.relay`, and subscribers, which are connected before the clock starts and discard
what they have verified. In the last row one more subscriber is stopped (SIGSTOP) just after the start. Rows
take turns, round after round, since a machine's speed drifts: read the ratios, not the digits. With more
processes than cores they wait for each other: the rates are then the machine's, not the relay's.

    egress MB/s  payload to all subscribers, from the first "go" to the last octet: median of the rounds
    x direct     that rate over the rate without a relay in the same round, median
    layer 0      until layer 0 is verified, median of the subscribers; "added": what is more than directly
    slowest      seconds of the slowest subscriber over those of the fastest, the worst of the rounds
    upstream     UDP payload from the publisher to the relay over the size of the cache, worst of the rounds
    CPU s/GB     processor time of publisher and relay, user and system, for 10^9 octets to subscribers
    peak MB      most memory that the relay had, what it has cached, and the bound: 1.15 times that and 64 MB

MB is 10^6 octets and GB 10^9. This passes and fails nothing: it prints.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.rows import HOST, KVCS, RELAYED, Settings, Sunk, Usage
from benchmarks.throughput import ROOT, Child, aligned, parser, prepared

STOP_AFTER: Final = 0.2
"""Seconds after "go" when a subscriber is stopped."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One row: so many subscribers, behind a relay or not, and perhaps one that is stopped."""

    name: str
    subscribers: int
    relay: bool = True
    stopped: bool = False


DIRECT: Final = Arrangement("direct, 1 subscriber", 1, relay=False)
ARRANGEMENTS: Final = (
    DIRECT,
    Arrangement("relay, 1 subscriber", 1),
    Arrangement("relay, 8 subscribers", 8),
    Arrangement("relay, 32 subscribers", 32),
    Arrangement("relay, 8 and a stopped one", 8, stopped=True),
)


@dataclass(frozen=True, slots=True)
class Relayed:
    """What the relay used. Octets, and processor seconds since "go"."""

    usage: Usage
    cached: int
    upstream: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row in one round. `whole` is seconds for all subscribers together."""

    sunk: Sequence[Sunk]
    whole: float
    publisher: Usage
    relay: Relayed | None

    @property
    def size(self) -> int:
        """Octets of payload, to all."""
        return sum(one.size for one in self.sunk)

    @property
    def rate(self) -> float:
        """Octets a second, to all."""
        return self.size / self.whole

    @property
    def first(self) -> float:
        """Seconds until layer 0."""
        return statistics.median(one.first for one in self.sunk)

    @property
    def spread(self) -> float:
        """The slowest over the fastest."""
        times = [one.whole for one in self.sunk]
        return max(times) / min(times)


class RelayProcess:
    """`python -m moqt.relay`, watched from outside: its pages, and /proc."""

    def __init__(self, settings: Settings) -> None:
        directory = Path(settings.directory)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moqt.relay", "--listen", f"{HOST}:0", "--json"),
                *("--cert", str(directory / "cert.pem"), "--key", str(directory / "key.pem")),
                *("--datagram-size", str(settings.datagram_size), "--metrics-port", "0"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._pages = self._until("watching")["address"]
        self.port = self._until("listening")["port"]
        self._cpu = 0.0

    def go(self) -> None:
        """The clock starts."""
        self._cpu = self._cpu_now()

    def report(self) -> Relayed:
        """What it has used since, and what it has and had."""
        cpu = self._cpu_now() - self._cpu
        status = json.loads(self._get("status"))
        (publisher,) = [session for session in status["sessions"] if session["announced"]]
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        return Relayed(Usage(cpu, peak), status["cache"]["bytes"], publisher["received"])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _cpu_now(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _until(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == event:
                return told
        raise RuntimeError("the relay ended early")

    def _get(self, page: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._pages}/{page}") as answer:
            body: bytes = answer.read()
            return body


def measure(arrangement: Arrangement, settings: Settings) -> Measurement:
    """One row, once."""
    with ExitStack() as stack:
        relay: RelayProcess | None = None
        row = KVCS
        if arrangement.relay:
            relay = RelayProcess(settings)
            stack.callback(relay.end)
            row, settings = RELAYED, replace(settings, relay_port=relay.port)

        def child(*port: str) -> Child:
            made = Child(row, settings, *port)
            stack.callback(made.end)
            return made

        publisher = child()
        port = str(publisher.hear()["port"])
        sinks = [child(port) for _ in range(arrangement.subscribers)]
        stopped = [child(port)] if arrangement.stopped else []
        for sink in sinks + stopped:
            sink.hear()
        publisher.nudge()
        if relay is not None:
            relay.go()
        began = time.perf_counter()
        for sink in sinks + stopped:
            sink.nudge()
        if stopped:
            time.sleep(STOP_AFTER)
            stopped[0].process.send_signal(signal.SIGSTOP)
        told = [sink.hear() for sink in sinks]
        whole = time.perf_counter() - began
        relayed = None if relay is None else relay.report()
        publisher.nudge()
        usage = Usage(**publisher.hear()["usage"])
        return Measurement([Sunk(**one["sunk"]) for one in told], whole, usage, relayed)


HEADINGS: Final = (
    "",
    "egress MB/s",
    "(min-max)",
    "x direct",
    "layer 0",
    "added",
    "slowest",
    "upstream",
    "CPU s/GB pub",
    "relay",
    "peak MB",
    "cached",
    "bound",
)


def figures(arrangement: Arrangement, rounds: Sequence[dict[Arrangement, Measurement]]) -> Sequence[str]:
    """The line of a row, below HEADINGS."""
    runs = [one[arrangement] for one in rounds]
    rates = [run.rate / 1e6 for run in runs]

    def middle(of: Callable[[dict[Arrangement, Measurement]], float]) -> float:
        return statistics.median(map(of, rounds))

    relays = [run.relay for run in runs if run.relay is not None]
    line = [
        arrangement.name,
        f"{statistics.median(rates):.1f}",
        f"({min(rates):.1f}-{max(rates):.1f})",
        f"{middle(lambda one: one[arrangement].rate / one[DIRECT].rate):.2f}",
        f"{middle(lambda one: one[arrangement].first) * 1e3:.0f} ms",
        f"{middle(lambda one: one[arrangement].first - one[DIRECT].first) * 1e3:.0f} ms",
        f"{max(run.spread for run in runs):.2f} x",
    ]
    if not relays:
        publisher = middle(lambda one: one[arrangement].publisher.cpu / one[arrangement].size)
        return [*line, "", f"{publisher * 1e9:.2f}", *[""] * 4]
    cached = max(relay.cached for relay in relays)
    cpu = statistics.median(relay.usage.cpu / run.size for relay, run in zip(relays, runs, strict=True))
    return [
        *line,
        f"{max(relay.upstream / run.sunk[0].size for relay, run in zip(relays, runs, strict=True)):.3f} x",
        f"{middle(lambda one: one[arrangement].publisher.cpu / one[arrangement].size) * 1e9:.2f}",
        f"{cpu * 1e9:.2f}",
        f"{max(relay.usage.peak for relay in relays) / 1e6:.0f}",
        f"{cached / 1e6:.0f}",
        f"{1.15 * cached / 1e6 + 64:.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    with prepared(options) as settings:
        rounds = [{row: measure(row, settings) for row in ARRANGEMENTS} for _ in range(options.rounds)]
    print(aligned([HEADINGS, *(figures(row, rounds) for row in ARRANGEMENTS)]))


if __name__ == "__main__":
    main()
