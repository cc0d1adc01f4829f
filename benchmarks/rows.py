"""The rows of throughput.py and relay.py: what child processes run, `python -m rows NAME SETTINGS [PORT]`.

A child talks to the benchmark in lines of JSON over its standard streams. It imports little besides what its
row needs, so that its peak memory is that of the row.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvcs.identity import Descriptor
    from kvcs.publisher import Publisher

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
    directory: str
    """Holds ca.pem, cert.pem and key.pem."""
    relay_port: int = 0
    """Where the relay is that RELAYED goes through."""


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


class Control:
    """The child's end of the benchmark: when to start, and what to tell."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._cpu = 0.0
        self._go = 0.0
        self._size = 0
        self._first: float | None = None
        self._whole: float | None = None

    async def serve(self, port: int) -> None:
        """For a publisher that listens on `port`: returns when it may end."""
        self._tell(port=port)
        await self._wait()
        self._cpu = time.process_time()
        await self._wait()
        self._tell(usage=asdict(self._usage()))

    async def go(self) -> None:
        """For a subscriber that is connected: returns when the clock starts."""
        self._tell(connected=True)
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
        sunk = Sunk(self._size, self._first, self._whole)
        self._tell(sunk=asdict(sunk), usage=asdict(self._usage()))

    def _tell(self, **what: Any) -> None:
        print(json.dumps(what), flush=True)

    async def _wait(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

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
        Path(control.settings.directory, "cert.pem"), Path(control.settings.directory, "key.pem")
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
    configuration.load_verify_locations(str(Path(control.settings.directory, "ca.pem")))
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


async def _published(settings: Settings) -> Publisher:
    """All layers of a cache."""
    import numpy as np

    from kvcs.identity import ScopeKey
    from kvcs.publisher import Publisher

    publisher = Publisher(_descriptor(settings), ScopeKey(bytes(32)))
    publication = publisher.publish(_tokens(settings))
    # In one pool, as engines keep it. Of random bits, which no page of memory shares.
    shape = (settings.layers, 2, len(_tokens(settings)), 8, 128)
    pool = np.frombuffer(os.urandom(settings.size), publisher.geometry.dtype).reshape(shape)
    for layer, (k, v) in enumerate(pool):
        await publication.segment.put_layer(layer, k, v)
    return publisher


async def publish_kvcs(control: Control) -> None:
    """The product: all layers published before "go", then served by FETCH."""
    import moqt

    gc.freeze()  # what is imported, as the commands do (moqt.console.run)
    settings = control.settings
    publisher = await _published(settings)
    directory = Path(settings.directory)
    async with moqt.serve(
        HOST,
        0,
        certificate=directory / "cert.pem",
        key=directory / "key.pem",
        tracks=publisher.tracks,
        options=moqt.QuicOptions(max_datagram_size=settings.datagram_size),
    ) as server:
        await control.serve(server.port)


async def publish_to_relay(control: Control) -> None:
    """The same at a relay, which subscribers dial in its place."""
    import moqt

    settings = control.settings
    publisher = await _published(settings)
    async with moqt.connect(
        f"moqt://{HOST}:{settings.relay_port}/",
        ca=Path(settings.directory, "ca.pem"),
        tracks=publisher.tracks,
        announce=True,
        options=moqt.QuicOptions(max_datagram_size=settings.datagram_size),
    ):
        await control.serve(settings.relay_port)


async def sink_kvcs(control: Control, port: int) -> None:
    """Discovery, manifest, every check of every Object, and each layer dropped when it is handed over."""
    import moqt
    from kvcs.identity import ScopeKey
    from kvcs.subscriber import Subscriber

    gc.freeze()  # what is imported, as the commands do (moqt.console.run)
    settings = control.settings
    options = moqt.QuicOptions(max_datagram_size=settings.datagram_size)
    async with moqt.connect(
        f"moqt://{HOST}:{port}/", ca=Path(settings.directory, "ca.pem"), options=options
    ) as session:
        subscriber = Subscriber(session, _descriptor(settings), ScopeKey(bytes(32)))
        await control.go()
        async with await subscriber.receive(_tokens(settings), wait=10.0) as reception:
            async for layer in reception:
                assert layer.v is not None
                control.received(layer.k.nbytes + layer.v.nbytes)
        control.finished()


TCP: Final = Row("TCP, asyncio streams", publish_tcp, sink_tcp)
AIOQUIC: Final = Row("aioquic, one uni stream", publish_aioquic, sink_aioquic)
KVCS: Final = Row("kvcs, digests checked", publish_kvcs, sink_kvcs)
RELAYED: Final = Row("kvcs, through a relay", publish_to_relay, sink_kvcs)
ROWS: Final = (TCP, AIOQUIC, KVCS)


def main() -> None:
    """`rows NAME SETTINGS [PORT]`: the publisher of a row, or with a port its subscriber."""
    row = next(row for row in (*ROWS, RELAYED) if row.name == sys.argv[1])
    control = Control(Settings(**json.loads(sys.argv[2])))

    async def run() -> None:
        await (row.sink(control, int(sys.argv[3])) if len(sys.argv) > 3 else row.publish(control))

    asyncio.run(run())


if __name__ == "__main__":
    main()
