"""How fast a KV cache travels, next to two yardsticks that are measured in the same run.

    python benchmarks/throughput.py

Each row is a publisher and a subscriber, two processes on this machine, over the loopback interface. The
publisher holds what it sends; the subscriber is connected before the clock starts, and discards what it gets.
Rows take turns, round after round, since a machine's speed drifts: read the ratios, not the digits.

    MB/s             payload, from the subscriber's "go" to the last octet: median of the rounds
    x TCP, x aioquic that rate over the rate of the yardstick in the same round, median
    first            until the first data (kvcs: until layer 0 is verified and handed over)
    of whole         the same as a share of the whole time
    CPU s/GB         processor time of each process, user and system, for 10^9 octets of payload
    peak MB          ru_maxrss of each process

MB is 10^6 octets and GB 10^9. This passes and fails nothing: it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.rows import AIOQUIC, MAX_DATAGRAM_SIZE, ROWS, TCP, Row, Settings, Sunk, Usage

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row in one round."""

    sunk: Sunk
    publisher: Usage
    subscriber: Usage

    @property
    def rate(self) -> float:
        """Octets a second."""
        return self.sunk.size / self.sunk.whole


class Child:
    """A process of a row, and what it tells."""

    def __init__(self, row: Row, settings: Settings, *port: str) -> None:
        # By -m, as the commands are run: a script is compiled anew each time, and its peak memory shows it.
        command = [sys.executable, "-m", "rows", row.name, json.dumps(asdict(settings)), *port]
        path = os.pathsep.join(filter(None, (str(HERE), str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def hear(self) -> dict[str, Any]:
        """The next that it tells. Raises RuntimeError when it has ended instead (its stderr says why)."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of a row ended early: {self.process.args!r}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def nudge(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure(row: Row, settings: Settings) -> Measurement:
    """One row, once."""
    children = [Child(row, settings)]
    try:
        publisher = children[0]
        children.append(Child(row, settings, str(publisher.hear()["port"])))
        subscriber = children[1]
        subscriber.hear()
        publisher.nudge()
        subscriber.nudge()
        told = subscriber.hear()
        publisher.nudge()
        return Measurement(Sunk(**told["sunk"]), Usage(**publisher.hear()["usage"]), Usage(**told["usage"]))
    finally:
        for child in children:
            child.end()


def machine() -> str:
    """Processor, cores, kernel, Python and aioquic, on one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        if names:
            model = f"{len(names)} x {names[0]}"
    return (
        f"{model}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, aioquic {version('aioquic')}"
    )


HEADINGS: Final = (
    "",
    "MB",
    "MB/s",
    "(min-max)",
    "x TCP",
    "x aioquic",
    "first",
    "of whole",
    "CPU s/GB pub",
    "sub",
    "peak MB pub",
    "sub",
)


def figures(name: str, rounds: Sequence[dict[str, Measurement]]) -> Sequence[str]:
    """The line of the row of this name, below HEADINGS."""
    runs = [measurements[name] for measurements in rounds]
    rates = [run.rate / 1e6 for run in runs]

    def middle(of: Callable[[Measurement], float]) -> float:
        return statistics.median(map(of, runs))

    def ratio(yardstick: Row) -> float:
        return statistics.median(one[name].rate / one[yardstick.name].rate for one in rounds)

    return (
        name,
        f"{runs[0].sunk.size / 1e6:.0f}",
        f"{statistics.median(rates):.1f}",
        f"({min(rates):.1f}-{max(rates):.1f})",
        f"{ratio(TCP):.3f}",
        f"{ratio(AIOQUIC):.2f}",
        f"{middle(lambda run: run.sunk.first) * 1e3:.1f} ms",
        f"{middle(lambda run: run.sunk.first / run.sunk.whole):.1%}",
        f"{middle(lambda run: run.publisher.cpu / run.sunk.size) * 1e9:.2f}",
        f"{middle(lambda run: run.subscriber.cpu / run.sunk.size) * 1e9:.2f}",
        f"{max(run.publisher.peak for run in runs) / 1e6:.1f}",
        f"{max(run.subscriber.peak for run in runs) / 1e6:.0f}",
    )


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as columns, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that benchmarks have in common."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default, metavar, text in (
        ("--rounds", 3, None, "how often each row runs"),
        ("--size", 64, "MIB", "payload of the QUIC rows in MiB"),
        ("--object-size", 32, "KIB", "data of one Object in KiB"),
        ("--layers", 64, None, "layers of the cache"),
        ("--datagram-size", MAX_DATAGRAM_SIZE, "OCTETS", "UDP payload of the kvcs rows"),
    ):
        made.add_argument(
            option, type=int, default=default, metavar=metavar, help=f"{text} (default: {default})"
        )
    return made


@contextmanager
def prepared(options: argparse.Namespace, *, tcp_size: int = 0) -> Iterator[Settings]:
    """Say what is measured where, and make the certificates."""
    print(machine())
    print(
        f"loopback, {options.rounds} rounds, {options.size} MiB, {options.datagram_size}-octet datagrams, "
        f"Objects of {options.object_size} KiB, {options.layers} layers\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, ROOT / "certs" / "make.py", directory], check=True, stdout=subprocess.DEVNULL
        )
        yield Settings(
            size=options.size << 20,
            tcp_size=tcp_size << 20,
            object_size=options.object_size << 10,
            layers=options.layers,
            datagram_size=options.datagram_size,
            directory=directory,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    arguments_of = parser(__doc__)
    arguments_of.add_argument(
        "--tcp-size",
        type=int,
        default=256,
        metavar="MIB",
        help="payload of the TCP row in MiB (default: %(default)s)",
    )
    options = arguments_of.parse_args(arguments)
    with prepared(options, tcp_size=options.tcp_size) as settings:
        rounds = [{row.name: measure(row, settings) for row in ROWS} for _ in range(options.rounds)]
    print(aligned([HEADINGS, *(figures(row.name, rounds) for row in ROWS)]))


if __name__ == "__main__":
    main()
