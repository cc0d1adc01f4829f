"""Dialling and listening over real sockets: errors that a user can act on, limits, other people's aioquic."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from moqt.errors import ConnectionLost, DeadlineExceeded, UsageError
from moqt.quic import udp
from moqt.quic.api import Connection, QuicOptions
from moqt.quic.connection import AioquicConnection
from moqt.quic.datagrams import UdpSocket
from moqt.quic.udp import Listener, ListenLimits, dial, listen
from tests.quic.contract import noise, read_all

if TYPE_CHECKING:
    from tests.conftest import Certificates

ALPN = ["moqt-22"]


class Server:
    """A listener, and the connections that it has accepted."""

    def __init__(self, listener: Listener, connections: asyncio.Queue[Connection]) -> None:
        self.listener = listener
        self.port = listener.port
        self.connections = connections


@asynccontextmanager
async def serving(
    certificates: Certificates, host: str = "127.0.0.1", *, expired: bool = False, **more: Any
) -> AsyncIterator[Server]:
    connections: asyncio.Queue[Connection] = asyncio.Queue()
    listener = await listen(
        host,
        0,
        certificate=certificates.expired_chain if expired else certificates.chain,
        key=certificates.expired_key if expired else certificates.key,
        on_connection=connections.put_nowait,
        **{"alpn": ALPN, **more},
    )
    try:
        yield Server(listener, connections)
    finally:
        listener.close()
        await listener.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("the condition never came to hold")


async def finish(*connections: Connection) -> None:
    for connection in connections:
        connection.close()
        await connection.wait_closed()


async def echo_once(client: Connection, server: Connection, data: bytes) -> None:
    stream = client.open(bidirectional=True)

    async def answer() -> None:
        incoming = await server.accept()
        await incoming.write(await read_all(incoming), fin=True)

    async with asyncio.TaskGroup() as group:
        group.create_task(answer())
        group.create_task(stream.write(data, fin=True))
        assert await read_all(stream) == data


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A UDP port that takes everything and answers nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture
def dead_port() -> int:
    """A UDP port where nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# Names and addresses.


@pytest.mark.parametrize(
    ("listen_at", "dial_to"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("localhost", "localhost"),
        ("::1", "::1"),
        ("::", "127.0.0.1"),
        ("::", "::1"),
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
    ],
)
async def test_where_to_listen_and_dial(certificates: Certificates, listen_at: str, dial_to: str) -> None:
    async with serving(certificates, listen_at) as server:
        client = await dial(dial_to, server.port, alpn=ALPN, ca=certificates.ca)
        other = await server.connections.get()
        assert client.peer in (f"127.0.0.1:{server.port}", f"[::1]:{server.port}")
        assert other.peer.startswith(("127.0.0.1:", "[::1]:"))
        assert server.listener.port == server.port
        assert all(address.endswith(f":{server.port}") for address in server.listener.addresses)
        await echo_once(client, other, noise(100_000))
        await finish(client)


async def test_the_name_may_differ_from_the_address(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca, server_name="localhost")
        await finish(client)


async def test_the_next_address_is_tried_after_a_refusal(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, dead_port: int
) -> None:
    async with serving(certificates) as server:
        resolved = [
            (socket.AF_INET, ("127.0.0.1", dead_port)),
            (socket.AF_INET, ("127.0.0.1", server.port)),
        ]
        monkeypatch.setattr(udp, "_resolve", lambda *_: _done(resolved))
        await finish(await dial("localhost", 1, alpn=ALPN, ca=certificates.ca))


async def test_the_next_address_is_tried_after_silence(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    monkeypatch.setattr(udp, "ATTEMPT", 0.05)
    async with serving(certificates) as server:
        resolved = [
            (socket.AF_INET, ("127.0.0.1", silent_port)),
            (socket.AF_INET, ("127.0.0.1", server.port)),
        ]
        monkeypatch.setattr(udp, "_resolve", lambda *_: _done(resolved))
        await finish(await dial("localhost", 1, alpn=ALPN, ca=certificates.ca))


async def _done(value: Any) -> Any:
    return value


# Failures.


async def test_a_dead_port_is_told_at_once(certificates: Certificates, dead_port: int) -> None:
    with pytest.raises(ConnectionLost, match=f"nothing listens on UDP port {dead_port} there"):
        await dial("127.0.0.1", dead_port, alpn=ALPN, ca=certificates.ca, deadline=60)


async def test_a_refusal_may_come_with_a_write(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(UdpSocket, "_write_run", refuse)
    with pytest.raises(ConnectionLost, match="nothing listens"):
        await dial("127.0.0.1", silent_port, alpn=ALPN, ca=certificates.ca)


async def test_other_errors_of_the_network_are_told(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENETDOWN, "Network is down")

    monkeypatch.setattr(UdpSocket, "_write_run", fail)
    with pytest.raises(ConnectionLost, match="Network is down"):
        await dial("127.0.0.1", silent_port, alpn=ALPN, ca=certificates.ca)
    with pytest.raises(ConnectionLost, match="Permission denied"):
        await dial("255.255.255.255", 4433, alpn=ALPN, ca=certificates.ca)


async def test_silence_ends_at_the_deadline(certificates: Certificates, silent_port: int) -> None:
    with pytest.raises(DeadlineExceeded, match="is the server running") as caught:
        await dial("127.0.0.1", silent_port, alpn=ALPN, ca=certificates.ca, deadline=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert f"127.0.0.1:{silent_port}" in str(caught.value)


async def test_the_reason_for_each_address_is_told(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, dead_port: int
) -> None:
    resolved = [(socket.AF_INET, (host, dead_port)) for host in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(udp, "_resolve", lambda *_: _done(resolved))
    with pytest.raises(ConnectionLost) as caught:
        await dial("host", dead_port, alpn=ALPN, ca=certificates.ca)
    assert f"127.0.0.1:{dead_port}: nothing listens" in str(caught.value)
    assert f"127.0.0.2:{dead_port}: nothing listens" in str(caught.value)


async def test_a_cancelled_dial_leaves_nothing(certificates: Certificates, silent_port: int) -> None:
    for turns in range(4):
        task = asyncio.create_task(dial("127.0.0.1", silent_port, alpn=ALPN, ca=certificates.ca))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_dial_that_is_cancelled_at_any_turn_leaves_nothing(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        for turns in range(1000):
            task = asyncio.create_task(dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                client = await task
            except asyncio.CancelledError:
                continue
            await finish(client)
            break
        assert turns > 1
        await until(lambda: not server.listener.connections)


async def test_an_unknown_host(certificates: Certificates) -> None:
    with pytest.raises(ConnectionLost, match="no-such-host"):
        await dial("no-such-host.invalid", 4433, alpn=ALPN, ca=certificates.ca)


async def test_the_wrong_ca(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        with pytest.raises(ConnectionLost, match=r"TLS alert 42 .*right CA file"):
            await dial("localhost", server.port, alpn=ALPN, ca=certificates.other_ca)


async def test_the_public_cas_when_none_is_given(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        with pytest.raises(ConnectionLost, match=r"TLS alert 42 .*right CA file"):
            await dial("localhost", server.port, alpn=ALPN)


async def test_an_expired_certificate(certificates: Certificates) -> None:
    async with serving(certificates, expired=True) as server:
        with pytest.raises(ConnectionLost, match=r"TLS alert 45 .*expired.*clocks"):
            await dial("localhost", server.port, alpn=ALPN, ca=certificates.ca)


@pytest.mark.parametrize("name", ["example.org", "127.0.0.2", "::2"])
async def test_the_wrong_name(certificates: Certificates, name: str) -> None:
    async with serving(certificates) as server:
        with pytest.raises(ConnectionLost, match="doesn't match") as caught:
            await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca, server_name=name)
        assert name in str(caught.value)


async def test_no_common_protocol(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        with pytest.raises(ConnectionLost, match=r"TLS alert 120 .*different versions of MOQT"):
            await dial("localhost", server.port, alpn=["moqt-99"], ca=certificates.ca)


async def test_each_dial_checks_its_own_name(certificates: Certificates) -> None:
    """aioquic keeps the first name in a configuration that is used twice."""
    async with serving(certificates) as server:
        await finish(await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca))
        with pytest.raises(ConnectionLost, match="doesn't match"):
            await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca, server_name="other.example")


async def test_bad_files(certificates: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    missing = tmp_path / "missing.pem"
    for ca, text in ((junk, "no certificates in PEM form"), (missing, "No such file")):
        with pytest.raises(UsageError, match=text):
            await dial("localhost", 1, alpn=ALPN, ca=ca)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
        )
    )
    for certificate, key, text in (
        (missing, certificates.key, "missing.pem: No such file"),
        (certificates.chain, missing, "missing.pem: No such file"),
        (junk, certificates.key, "junk.pem: no certificates in PEM form"),
        (certificates.chain, junk, "junk.pem: no private key in PEM form"),
        (certificates.chain, certificates.chain, "no private key"),
        (certificates.key, certificates.key, "no certificates"),
        (certificates.chain, locked, "locked.pem: the key is encrypted"),
        (certificates.chain, tmp_path, "Is a directory"),
        (certificates.chain, certificates.expired_key, "does not belong"),
    ):
        with pytest.raises(UsageError, match=text):
            await listen("127.0.0.1", 0, certificate=certificate, key=key, alpn=ALPN, on_connection=print)


async def test_an_address_that_is_taken(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(OSError, match="in use"):
                await listen(
                    host,
                    server.port,
                    certificate=certificates.chain,
                    key=certificates.key,
                    alpn=ALPN,
                    on_connection=print,
                )


async def test_all_addresses_of_a_name_get_one_port(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = [
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_INET6, ("::1", 0, 0, 0)),
        (socket.AF_INET, ("192.0.2.1", 0)),  # not ours: left out
    ]
    with monkeypatch.context() as context:
        context.setattr(udp, "_resolve", lambda *_, **__: _done(resolved))
        server_context = serving(certificates, "name.example")
        server = await server_context.__aenter__()
    assert server.listener.addresses == [f"127.0.0.1:{server.port}", f"[::1]:{server.port}"]
    for host in ("127.0.0.1", "::1"):
        await finish(await dial(host, server.port, alpn=ALPN, ca=certificates.ca))
    await server_context.__aexit__(None, None, None)
    with pytest.raises(OSError, match="assign"):
        async with serving(certificates, "192.0.2.1"):
            pytest.fail("192.0.2.1 is not ours")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_datagram_size": 1199},
        {"max_datagram_size": 16001},
        {"max_stream_data": 100},
        {"max_data": 1 << 20, "max_stream_data": 2 << 20},
        {"max_uni_streams": 0},
        {"idle_timeout": 0},
        {"keepalive": 0},
    ],
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        QuicOptions(**wrong)


# Limits.


async def test_retry(certificates: Certificates) -> None:
    async with serving(certificates, limits=ListenLimits(retry="always")) as server:
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        await echo_once(client, await server.connections.get(), b"after a retry")
        await finish(client)


async def test_retry_under_load(certificates: Certificates) -> None:
    """While handshakes are under way that may be of nobody, a client must prove its address."""
    async with serving(
        certificates, limits=ListenLimits(retry="load", busy=2, handshake_seconds=60)
    ) as server:
        first = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", 0))
            sock.settimeout(5)
            answers = []
            for _ in range(3):
                sock.sendto(first_flight(certificates), ("127.0.0.1", server.port))
                answers.append((await asyncio.to_thread(sock.recv, 2000))[0])
            retries = [answer & 0xF0 == 0xF0 for answer in answers]  # RFC 9000 17.2.5: type 3
            assert (retries[0], retries[-1]) == (False, True)
        assert server.listener.handshakes == 2
        second = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        for client in (first, second):
            await echo_once(client, await server.connections.get(), b"proven or not")
        await finish(first, second)


async def test_a_made_up_retry_token_makes_no_connection(certificates: Certificates) -> None:
    async with serving(certificates, limits=ListenLimits(retry="always")) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for token in (b"x", bytes(100)):
                sock.sendto(first_flight(certificates, token), ("127.0.0.1", server.port))
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        assert server.listener.connections == 1
        await finish(client)


@pytest.mark.parametrize("limits", [ListenLimits(connections=2), ListenLimits(connections_per_address=2)])
async def test_connections_are_limited(certificates: Certificates, limits: ListenLimits) -> None:
    async with serving(certificates, limits=limits) as server:
        clients = [await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca) for _ in range(2)]
        with pytest.raises(DeadlineExceeded):
            await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca, deadline=0.2)
        assert server.listener.connections == 2
        assert server.listener.refused > 0
        await finish(*clients)
        await until(lambda: not server.listener.connections)
        await finish(await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca))


def test_who_holds_an_address() -> None:
    assert udp._holder("192.0.2.1") == "192.0.2.1"
    assert udp._holder("::ffff:192.0.2.1") != udp._holder("::ffff:192.0.2.2")
    assert udp._holder("2001:db8::1") == udp._holder("2001:db8::ffff:0:0:1")
    assert udp._holder("2001:db8:0:1::1") != udp._holder("2001:db8::1")
    assert udp._holder("fe80::1%eth0") == udp._holder("fe80::2%eth0")


def first_flight(certificates: Certificates, token: bytes = b"") -> bytes:
    """The first datagram of a client."""
    configuration = QuicConfiguration(alpn_protocols=ALPN, token=token)
    configuration.load_verify_locations(str(certificates.ca))
    quic = QuicConnection(configuration=configuration)
    quic.connect(("127.0.0.1", 1), 0.0)
    return quic.datagrams_to_send(0.0)[0][0]


async def test_a_handshake_that_stops_is_given_up(certificates: Certificates) -> None:
    async with serving(certificates, limits=ListenLimits(handshake_seconds=0.1)) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(first_flight(certificates), ("127.0.0.1", server.port))
            await until(lambda: server.listener.connections > 0)
            await until(lambda: server.listener.connections == 0)
        assert server.connections.empty()


async def test_garbage_makes_no_connection(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        initial = first_flight(certificates)
        address = ("127.0.0.1", server.port)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for garbage in (
                b"",
                b"\x00",
                b"\x40" * 100,
                b"\xc0" * 30,
                noise(1200),
                initial[:600],
                initial[:40] + noise(1160),  # an Initial that can't be decrypted
            ):
                sock.sendto(garbage, address)
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        assert server.listener.connections == 1
        await finish(client)


async def test_an_unknown_version_is_answered(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            packet = bytes((0xC0, 0x1A, 0x2A, 0x3A, 0x4A, 8)) + bytes(range(8)) + bytes((8,)) + bytes(1200)
            await loop.sock_sendto(sock, packet, ("127.0.0.1", server.port))
            answer = await loop.sock_recv(sock, 2000)
        assert answer[0] & 0x80
        assert answer[1:5] == bytes(4)
        assert b"\x00\x00\x00\x01" in answer
        assert server.listener.connections == 0


async def test_connection_ids_change(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        other = await server.connections.get()
        assert isinstance(client, AioquicConnection)
        for _ in range(20):
            client.engine.change_connection_id()
            await echo_once(client, other, noise(20_000))
        await finish(client)


# Ends.


async def test_closing_the_listener_closes_its_connections(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        clients = [await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca) for _ in range(3)]
        server.listener.close(9, "maintenance")
        for client in clients:
            end = await client.wait_closed()
            assert (end.code, end.reason, end.remote) == (9, "maintenance", True)
        await server.listener.wait_closed()
        with pytest.raises(ConnectionLost, match="nothing listens"):
            await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)


async def test_a_vanished_server_is_noticed_by_its_silence(certificates: Certificates) -> None:
    """ICMP does not end an established connection: anyone could forge it."""
    options = QuicOptions(idle_timeout=0.5, keepalive=0.1)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(certificates, options=options))
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca, options=options)
        other = await server.connections.get()
        assert hasattr(other, "lost")
        other.lost("pulled the plug")
        await stack.aclose()
        end = await client.wait_closed()
        assert "idle time-out" in end.reason


async def test_a_callback_that_raises_costs_one_connection(certificates: Certificates) -> None:
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
    seen: list[Connection] = []

    def refuse_the_first(connection: Connection) -> None:
        seen.append(connection)
        if len(seen) == 1:
            raise KeyError("bug")

    listener = await listen(
        "127.0.0.1",
        0,
        certificate=certificates.chain,
        key=certificates.key,
        alpn=ALPN,
        on_connection=refuse_the_first,
    )
    first = await dial("127.0.0.1", listener.port, alpn=ALPN, ca=certificates.ca)
    assert (await first.wait_closed()).code == 1
    second = await dial("127.0.0.1", listener.port, alpn=ALPN, ca=certificates.ca)
    await second.ping()
    await finish(second)
    listener.close()
    await listener.wait_closed()
    loop.set_exception_handler(None)
    assert [str(fault) for fault in faults] == ["'bug'"]


# Other people's aioquic.


async def test_a_stock_aioquic_client(certificates: Certificates) -> None:
    configuration = QuicConfiguration(alpn_protocols=ALPN)
    configuration.load_verify_locations(str(certificates.ca))
    tickets: list[object] = []
    data = noise(1 << 20)
    async with (
        serving(certificates) as server,
        connect(
            "127.0.0.1",
            server.port,
            configuration=configuration,
            session_ticket_handler=tickets.append,
        ) as client,
    ):
        other = await server.connections.get()
        reader, writer = await client.create_stream()
        writer.write(data)
        writer.write_eof()
        incoming = await other.accept()
        assert await read_all(incoming) == data
        await incoming.write(data, fin=True)
        assert await reader.read() == data
        with pytest.raises(UsageError, match="takes no datagrams"):
            other.send_datagram(b"x")
        client.close()
    assert tickets == []  # without tickets there is no 0-RTT, which could be replayed


async def test_a_stock_aioquic_server(certificates: Certificates) -> None:
    configuration = QuicConfiguration(alpn_protocols=ALPN, is_client=False)
    configuration.load_cert_chain(certificates.chain, certificates.key)
    tasks: set[asyncio.Task[None]] = set()

    def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def echo() -> None:
            writer.write(await reader.read())
            writer.write_eof()

        tasks.add(asyncio.create_task(echo()))

    protocols: list[QuicConnectionProtocol] = []

    def make(*arguments: Any, **more: Any) -> QuicConnectionProtocol:
        protocols.append(QuicConnectionProtocol(*arguments, **more))
        return protocols[-1]

    stock = await serve(
        "127.0.0.1", 0, configuration=configuration, create_protocol=make, stream_handler=handle
    )
    assert stock._transport is not None
    port = stock._transport.get_extra_info("sockname")[1]
    client = await dial("127.0.0.1", port, alpn=ALPN, ca=certificates.ca)
    for size in (10, 1 << 20):
        stream = client.open(bidirectional=True)
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.write(noise(size), fin=True))
            assert await read_all(stream) == noise(size)
    await finish(client)
    await asyncio.gather(*tasks)
    for protocol in protocols:
        await protocol.wait_closed()
    stock.close()
    await asyncio.sleep(0)


# The socket.


async def test_what_the_kernel_does_not_take_waits(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third write is refused with EAGAIN; nothing is lost and nobody spins."""
    calls = 0
    original: Callable[..., None] = UdpSocket._write_run

    def sometimes(self: UdpSocket, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise BlockingIOError
        original(self, *arguments)

    monkeypatch.setattr(UdpSocket, "_write_run", sometimes)
    async with serving(certificates) as server:
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        await echo_once(client, await server.connections.get(), noise(1 << 20))
        await finish(client)
    assert calls < 20_000


@pytest.mark.parametrize("code", ["EIO", "EINVAL", "EMSGSIZE"])
async def test_without_segmentation_offload(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    original: Callable[..., None] = UdpSocket._write_run

    def single(self: UdpSocket, datagrams: Any, at: int, count: int) -> None:
        if count > 1:
            raise OSError(getattr(errno, code), code)
        original(self, datagrams, at, count)

    monkeypatch.setattr(UdpSocket, "_write_run", single)
    async with serving(certificates) as server:
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca)
        await echo_once(client, await server.connections.get(), noise(1 << 20))
        await finish(client)


async def test_large_datagrams_on_loopback(certificates: Certificates) -> None:
    options = QuicOptions(max_datagram_size=16000)
    async with serving(certificates, options=options) as server:
        client = await dial("127.0.0.1", server.port, alpn=ALPN, ca=certificates.ca, options=options)
        await echo_once(client, await server.connections.get(), noise(4 << 20))
        await finish(client)
