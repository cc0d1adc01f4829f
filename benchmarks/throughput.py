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
import asyncio
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvcs.identity import Descriptor

# A child's ru_maxrss starts from the peak of the process that started it, so this module imports little: what
# a row needs is imported by its functions.

ROOT: Final = Path(__file__).resolve().parent.parent
HOST: Final = "127.0.0.1"
CHUNK: Final = 1 << 18
MAX_DATAGRAM_SIZE: Final = 1452
ALPN: Final = "benchmark"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the rows are asked to move. Sizes are octets."""

    size: int
    tcp_size: int
    object_size: int
    layers: int
    datagram_size: int
    """Of the kvcs row; the aioquic yardstick always has MAX_DATAGRAM_SIZE."""
    directory: Path
    """Holds ca.pem, cert.pem and key.pem."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process used: processor seconds since "go", and its peak memory in octets."""

    cpu: float
    peak: int


@dataclass(frozen=True, slots=True)
class Sunk:
    """What the subscriber saw: octets of payload, and seconds until the first of it and until the last."""

    size: int
    first: float
    whole: float


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


class Control:
    """The child's end of the benchmark: when to start, and what to tell."""

    def __init__(self, pipe: Connection, settings: Settings) -> None:
        self.settings = settings
        self._pipe = pipe
        self._cpu = 0.0
        self._go = 0.0
        self._size = 0
        self._first: float | None = None
        self._whole: float | None = None

    async def serve(self, port: int) -> None:
        """For a publisher that listens on `port`: returns when it may end."""
        self._pipe.send(port)
        await self._wait()
        self._cpu = time.process_time()
        await self._wait()
        self._pipe.send(self._usage())

    async def go(self) -> None:
        """For a subscriber that is connected: returns when the clock starts."""
        self._pipe.send(None)
        await self._wait()
        self._cpu = time.process_time()
        self._go = time.perf_counter()

    def received(self, size: int) -> None:
        """For a subscriber: so many more octets of payload are here."""
        self._size += size
        if self._first is None:
            self.first()

    def first(self) -> None:
        """For a subscriber: what counts as the first data is here (by default the first octet)."""
        self._first = time.perf_counter() - self._go

    def finished(self) -> None:
        """For a subscriber: all is here, the clock stops."""
        self._whole = time.perf_counter() - self._go
        assert self._first is not None
        self._pipe.send((Sunk(self._size, self._first, self._whole), self._usage()))

    async def _wait(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)

    def _usage(self) -> Usage:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Usage(time.process_time() - self._cpu, peak if sys.platform == "darwin" else peak * 1024)


@dataclass(frozen=True, slots=True)
class Row:
    """A way to move data.

    `publish(control)` listens, awaits `control.serve(port)`, and ends. `sink(control, port)` connects, awaits
    `control.go()`, calls `control.received(octets)` as data comes, and in the end `control.finished()`.
    """

    name: str
    publish: Callable[[Control], Awaitable[None]]
    sink: Callable[[Control, int], Awaitable[None]]


async def publish_tcp(control: Control) -> None:
    """asyncio streams: one connection, the whole size in chunks, with drain()."""
    chunk = bytes(CHUNK)

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        for _ in range(control.settings.tcp_size // CHUNK):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(on_client, HOST, 0)
    async with server:
        await control.serve(server.sockets[0].getsockname()[1])


async def sink_tcp(control: Control, port: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    await control.go()
    writer.write(b"g")
    while data := await reader.read(CHUNK):
        control.received(len(data))
    control.finished()
    writer.close()


async def publish_aioquic(control: Control) -> None:
    """aioquic as it comes: its own asyncio server, all written to one unidirectional stream at once."""
    from aioquic.asyncio.protocol import QuicConnectionProtocol
    from aioquic.asyncio.server import serve
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.events import QuicEvent, StreamDataReceived

    data = bytes(control.settings.size)

    class Publisher(QuicConnectionProtocol):
        def quic_event_received(self, event: QuicEvent) -> None:
            if isinstance(event, StreamDataReceived) and event.data:
                stream = self._quic.get_next_available_stream_id(is_unidirectional=True)
                self._quic.send_stream_data(stream, data, end_stream=True)
                self.transmit()

    configuration = QuicConfiguration(
        is_client=False, alpn_protocols=[ALPN], max_datagram_size=MAX_DATAGRAM_SIZE
    )
    configuration.load_cert_chain(
        control.settings.directory / "cert.pem", control.settings.directory / "key.pem"
    )
    server = await serve(HOST, 0, configuration=configuration, create_protocol=Publisher)
    assert server._transport is not None  # its server tells nobody which port it got, but the transport does
    await control.serve(server._transport.get_extra_info("sockname")[1])
    server.close()


async def sink_aioquic(control: Control, port: int) -> None:
    from aioquic.asyncio.client import connect
    from aioquic.asyncio.protocol import QuicConnectionProtocol
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.events import QuicEvent, StreamDataReceived

    ended = asyncio.Event()

    class Subscriber(QuicConnectionProtocol):
        def quic_event_received(self, event: QuicEvent) -> None:
            if isinstance(event, StreamDataReceived):
                control.received(len(event.data))
                if event.end_stream:
                    ended.set()

    configuration = QuicConfiguration(alpn_protocols=[ALPN], max_datagram_size=MAX_DATAGRAM_SIZE)
    configuration.load_verify_locations(str(control.settings.directory / "ca.pem"))
    async with connect(HOST, port, configuration=configuration, create_protocol=Subscriber) as protocol:
        await protocol.wait_connected()
        await control.go()
        _, writer = await protocol.create_stream()
        writer.write(b"g")
        await ended.wait()
        control.finished()


def _descriptor(settings: Settings) -> Descriptor:
    """8 heads of 128 bfloat16 elements: 2 KiB a token and component, so that an Object has the asked size."""
    from kvcs.identity import Descriptor

    digest = "0" * 64
    return Descriptor.parse(
        {
            "profile": "kvsp-lp1",
            "model": "benchmark",
            "model_sha256": digest,
            "tokenizer_sha256": digest,
            "adapter_sha256": None,
            "attention": "gqa",
            "layers": settings.layers,
            "kv_heads": 8,
            "head_dim": 128,
            "dtype": "bfloat16",
            "block_tokens": settings.object_size // 2048,
            "layout": "thd-le",
            "position": {"kind": "none"},
            "window": 0,
            "kv_scales_sha256": None,
        }
    )


def _tokens(settings: Settings) -> range:
    return range(settings.size // (2 * settings.layers * 2048))


async def publish_kvcs(control: Control) -> None:
    """The product: all layers published before "go", then served by FETCH."""
    import numpy as np

    import moqt
    from kvcs.identity import ScopeKey
    from kvcs.publisher import Publisher

    settings = control.settings
    publisher = Publisher(_descriptor(settings), ScopeKey(bytes(32)))
    publication = publisher.publish(_tokens(settings))
    shape = (len(_tokens(settings)), 8, 128)
    for layer in range(settings.layers):
        k, v = (
            np.frombuffer(os.urandom(2 * shape[0] * 8 * 128), publisher.geometry.dtype).reshape(shape)
            for _ in "kv"
        )
        await publication.segment.put_layer(layer, k, v)
    directory = settings.directory
    async with moqt.serve(
        HOST,
        0,
        certificate=directory / "cert.pem",
        key=directory / "key.pem",
        tracks=publisher.tracks,
        options=moqt.QuicOptions(max_datagram_size=settings.datagram_size),
    ) as server:
        await control.serve(server.port)


async def sink_kvcs(control: Control, port: int) -> None:
    """Discovery, manifest, every check of every Object, and each layer dropped when it is handed over."""
    import moqt
    from kvcs.identity import ScopeKey
    from kvcs.subscriber import Subscriber

    settings = control.settings
    options = moqt.QuicOptions(max_datagram_size=settings.datagram_size)
    async with moqt.connect(
        f"moqt://{HOST}:{port}/", ca=settings.directory / "ca.pem", options=options
    ) as session:
        subscriber = Subscriber(session, _descriptor(settings), ScopeKey(bytes(32)))
        await control.go()
        async with await subscriber.receive(_tokens(settings)) as reception:
            async for layer in reception:
                assert layer.v is not None
                control.received(layer.k.nbytes + layer.v.nbytes)
        control.finished()


TCP: Final = Row("TCP, asyncio streams", publish_tcp, sink_tcp)
AIOQUIC: Final = Row("aioquic, one uni stream", publish_aioquic, sink_aioquic)
KVCS: Final = Row("kvcs, digests checked", publish_kvcs, sink_kvcs)
ROWS: Final = (TCP, AIOQUIC, KVCS)


def child(row: Row, settings: Settings, pipe: Connection, port: int | None) -> None:
    """What a process of a row runs: the publisher, or with a port the subscriber."""
    control = Control(pipe, settings)

    async def run() -> None:
        await (row.publish(control) if port is None else row.sink(control, port))

    asyncio.run(run())


def measure(row: Row, settings: Settings) -> Measurement:
    """One row, once. Raises EOFError when one of its processes ends early (what it printed says why)."""
    context = multiprocessing.get_context("spawn")
    publisher, publisher_end = context.Pipe()
    subscriber, subscriber_end = context.Pipe()
    processes = [context.Process(target=child, args=(row, settings, publisher_end, None), daemon=True)]
    try:
        processes[0].start()
        publisher_end.close()
        port = publisher.recv()
        processes.append(
            context.Process(target=child, args=(row, settings, subscriber_end, port), daemon=True)
        )
        processes[1].start()
        subscriber_end.close()
        subscriber.recv()
        publisher.send("go")
        subscriber.send("go")
        sunk, subscriber_usage = subscriber.recv()
        publisher.send("stop")
        publisher_usage = publisher.recv()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Measurement(sunk, publisher_usage, subscriber_usage)


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
        f"{max(run.publisher.peak for run in runs) / 1e6:.0f}",
        f"{max(run.subscriber.peak for run in runs) / 1e6:.0f}",
    )


def table(rounds: Sequence[dict[str, Measurement]]) -> str:
    """The figures of all rounds, aligned."""
    lines = [HEADINGS, *(figures(row.name, rounds) for row in ROWS)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each row runs (default: %(default)s)"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=64,
        metavar="MIB",
        help="payload of the QUIC rows (default: %(default)s MiB)",
    )
    parser.add_argument(
        "--tcp-size",
        type=int,
        default=256,
        metavar="MIB",
        help="payload of the TCP row (default: %(default)s MiB)",
    )
    parser.add_argument(
        "--object-size",
        type=int,
        default=32,
        metavar="KIB",
        help="data of one Object (default: %(default)s KiB)",
    )
    parser.add_argument("--layers", type=int, default=64, help="layers of the cache (default: %(default)s)")
    parser.add_argument(
        "--datagram-size",
        type=int,
        default=MAX_DATAGRAM_SIZE,
        metavar="OCTETS",
        help="UDP payload of the kvcs row (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    print(machine())
    print(
        f"loopback, {options.rounds} rounds, {options.datagram_size}-octet datagrams, Objects of "
        f"{options.object_size} KiB, {options.layers} layers\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, ROOT / "certs" / "make.py", directory], check=True, stdout=subprocess.DEVNULL
        )
        settings = Settings(
            size=options.size << 20,
            tcp_size=options.tcp_size << 20,
            object_size=options.object_size << 10,
            layers=options.layers,
            datagram_size=options.datagram_size,
            directory=Path(directory),
        )
        rounds = [{row.name: measure(row, settings) for row in ROWS} for _ in range(options.rounds)]
    print(table(rounds))


if __name__ == "__main__":
    main()
