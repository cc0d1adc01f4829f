"""Connected ends for the contract tests: in memory, aioquic over a simulated network, aioquic over UDP."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.quic.api import Connection, QuicOptions
from moqt.quic.connection import AioquicConnection
from moqt.quic.datagrams import Datagram
from moqt.quic.link import pair
from moqt.quic.memory import MemoryConnection
from moqt.quic.udp import _client_configuration, _server_configuration, dial, listen

if TYPE_CHECKING:
    from tests.conftest import Certificates

AnyConnection = AioquicConnection | MemoryConnection

ALPN = "moqt-22"


@dataclass
class Ends:
    """Two connected ends. `cut` makes the network swallow everything from then on."""

    client: AnyConnection
    server: AnyConnection
    cut: Callable[[], None]
    network: Network | None = None


class Port:
    """Where one aioquic connection puts its datagrams."""

    blocked = False

    def __init__(self, network: Network) -> None:
        self.network = network
        self.connection: AioquicConnection | None = None
        self.peer: Port | None = None
        self.removed = False

    def send(self, datagrams: list[Datagram]) -> None:
        assert self.peer is not None
        for data, _ in datagrams:
            self.network.carry(self.peer, data)

    def add_id(self, connection: AioquicConnection, connection_id: bytes) -> None:
        """There is one connection only."""

    def remove_id(self, connection: AioquicConnection, connection_id: bytes) -> None:
        """There is one connection only."""

    def remove(self, connection: AioquicConnection) -> None:
        self.removed = True


class Network:
    """Carries datagrams between two ports with a latency; loses, repeats and reorders some, by its seed."""

    def __init__(self, *, latency: float, jitter: float, loss: float, repeat: float, seed: int) -> None:
        self.latency = latency
        self.jitter = jitter
        self.loss = loss
        self.repeat = repeat
        self.dead = False
        self.carried = 0
        self.drop: Callable[[Port], bool] = lambda to: False
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.client_address = ("peer", 1)
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._under_way: list[tuple[float, int, Port, bytes]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def carry(self, to: Port, data: bytes) -> None:
        if self.dead or self._random.random() < self.loss or self.drop(to):
            return
        for _ in range(1 + (self._random.random() < self.repeat)):
            when = self._loop.time() + self.latency + self._random.random() * self.jitter
            heapq.heappush(self._under_way, (when, next(self._numbers), to, self.change(data)))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._under_way:
            self._timer = self._loop.call_at(self._under_way[0][0], self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        now = self._loop.time() + 1e-9
        batches: dict[Port, list[Datagram]] = {}
        while self._under_way and self._under_way[0][0] <= now:
            _, _, port, data = heapq.heappop(self._under_way)
            assert port.connection is not None
            sender = ("peer", 1) if port.connection.is_client else self.client_address
            batches.setdefault(port, []).append((data, sender))
        for port, batch in batches.items():
            if not port.removed and not self.dead:
                assert port.connection is not None
                self.carried += len(batch)
                port.connection.datagrams_received(batch)
                port.connection.transport_pass()
        self._set_timer()


@asynccontextmanager
async def memory_ends(
    client: QuicOptions | None = None,
    server: QuicOptions | None = None,
    *,
    jitter: float = 0.0,
    loss: float = 0.0,
    ragged: bool = False,
) -> AsyncIterator[Ends]:
    link = pair(client=client, server=server, jitter=jitter, loss=loss, ragged=ragged)
    try:
        yield Ends(link.client, link.server, link.cut)
    finally:
        link.client.close()
        link.server.close()
        await link.client.wait_closed()
        await link.server.wait_closed()


@asynccontextmanager
async def simulated_ends(
    certificates: Certificates,
    client: QuicOptions | None = None,
    server: QuicOptions | None = None,
    *,
    latency: float = 0.005,
    jitter: float = 0.0,
    loss: float = 0.0,
    repeat: float = 0.0,
    seed: int = 0,
) -> AsyncIterator[Ends]:
    """Real aioquic, handshake and all, over a network in the time of the event loop, which may be virtual."""
    client = client or QuicOptions()
    server = server or QuicOptions()
    network = Network(latency=latency, jitter=jitter, loss=loss, repeat=repeat, seed=seed)
    client_port, server_port = Port(network), Port(network)
    client_port.peer, server_port.peer = server_port, client_port
    client_end = AioquicConnection(
        configuration=_client_configuration([ALPN], client, certificates.ca, "localhost"),
        options=client,
        port=client_port,
        peer="server",
        on_ready=lambda _: None,
    )
    server_end = AioquicConnection(
        configuration=_server_configuration([ALPN], server, certificates.chain, certificates.key),
        options=server,
        port=server_port,
        peer="client",
        on_ready=lambda _: None,
        original_destination_connection_id=client_end.engine.original_destination_connection_id,
    )
    client_port.connection, server_port.connection = client_end, server_end
    client_end.engine.connect(("peer", 1), asyncio.get_running_loop().time())
    client_end.transport_pass()
    await client_end.settled
    await server_end.settled
    assert client_end.ready
    assert server_end.ready
    try:
        yield Ends(client_end, server_end, lambda: setattr(network, "dead", True), network)
    finally:
        client_end.close()
        server_end.close()
        await client_end.wait_closed()
        await server_end.wait_closed()
        assert client_port.removed
        assert server_port.removed


@asynccontextmanager
async def loopback_ends(
    certificates: Certificates, client: QuicOptions | None = None, server: QuicOptions | None = None
) -> AsyncIterator[Ends]:
    arrived: asyncio.Queue[Connection] = asyncio.Queue()
    listener = await listen(
        "127.0.0.1",
        0,
        certificate=certificates.chain,
        key=certificates.key,
        alpn=[ALPN],
        options=server,
        on_connection=arrived.put_nowait,
    )
    try:
        client_end = await dial("127.0.0.1", listener.port, alpn=[ALPN], ca=certificates.ca, options=client)
        server_end = await arrived.get()
        assert isinstance(client_end, AioquicConnection)
        assert isinstance(server_end, AioquicConnection)

        def cut() -> None:
            for end in (client_end, server_end):
                setattr(end._port, "send", lambda datagrams: None)  # noqa: B010 mypy allows no assignment to a method

        try:
            yield Ends(client_end, server_end, cut)
        finally:
            client_end.close()
            await client_end.wait_closed()
    finally:
        listener.close()
        await listener.wait_closed()
