"""`moqt.serve` and `moqt.connect` over real UDP in one process: addresses, what goes wrong, much data."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aioquic.asyncio.client import connect as stock_connect
from aioquic.asyncio.server import serve as stock_serve
from aioquic.quic.configuration import QuicConfiguration

import moqt
from moqt import (
    ConnectionLost,
    DeadlineExceeded,
    Fill,
    Item,
    LocationFilter,
    ReceivedObject,
    SessionClosed,
    Subscription,
    Track,
    Tracks,
    UsageError,
)
from moqt.errors import DoneCode
from moqt.quic.api import Connection
from moqt.quic.udp import dial, listen
from moqt.subscribing import FetchStream
from tests.moqt.scene import EVERYTHING, check_exactly_once, filled, make_track, objects

if TYPE_CHECKING:
    from tests.conftest import Certificates

OBJECT = 256 * 1024


@asynccontextmanager
async def serving(
    certificates: Certificates, *tracks: Track, host: str = "127.0.0.1", **more: Any
) -> AsyncIterator[moqt.Server]:
    offered = Tracks()
    for track in tracks:
        offered.add(track)
    async with moqt.serve(
        host, 0, certificate=certificates.chain, key=certificates.key, tracks=offered, **more
    ) as server:
        yield server


def uri(server: moqt.Server, host: str = "localhost") -> str:
    return f"moqt://{host}:{server.port}/"


def udp_port() -> tuple[socket.socket, int]:
    """A socket at a free port of 127.0.0.1, and its number."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock, sock.getsockname()[1]


def open_files() -> set[str]:
    """The sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return {target for target in found if target.startswith("socket:")}


@pytest.fixture
def nothing_left() -> Iterator[Callable[[], None]]:
    """Call it to check that no socket is left of what the test did since its start."""
    before = open_files()

    def check() -> None:
        gc.collect()
        assert open_files() <= before

    yield check
    check()


async def digest_of(reception: Subscription | FetchStream) -> tuple[str, list[Item]]:
    """A digest over all payloads in the order of their Locations, and what came."""
    items = [item async for item in reception]
    digest = hashlib.sha256()
    for item in sorted(objects(items), key=lambda item: item.location):
        digest.update(item.payload)
    return digest.hexdigest(), items


def digest_of_track(track: Track) -> str:
    digest = hashlib.sha256()
    for item in track.objects(moqt.Location(0, 0), moqt.Location(1 << 60, 0)):
        for part in item.payload:
            digest.update(part)
    return digest.hexdigest()


# Names and addresses.


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "[::1]"),
        ("localhost", "localhost"),
        ("::", "127.0.0.1"),
        ("::", "[::1]"),
        ("::", "localhost"),
    ],
)
async def test_addresses(certificates: Certificates, host: str, named: str) -> None:
    track = make_track(b"k")
    filled(track, range(2), 2, 1000)
    async with serving(certificates, track, host=host) as server:
        async with moqt.connect(uri(server, named), ca=certificates.ca) as session:
            assert session.peer_setup.implementation.startswith("kvcs")
            _, items = await digest_of(await session.fetch(track.name, filter=EVERYTHING))
            check_exactly_once(track, objects(items))
            await until(lambda: len(server.sessions) == 1)
        await until(lambda: not server.sessions)


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("the condition never came to hold")


# Much data.


@pytest.mark.parametrize("way", ["subscription", "fetch"])
async def test_32_mib_with_a_digest(certificates: Certificates, way: str) -> None:
    """Half of the subscription's Objects are filled, half come live."""
    track = make_track(b"k")
    groups, per_group = 16, 8
    async with (
        serving(certificates, track) as server,
        moqt.connect(uri(server), ca=certificates.ca) as session,
    ):
        filled(track, range(groups if way == "fetch" else groups // 2), per_group, OBJECT)
        if way == "fetch":
            digest, items = await digest_of(await session.fetch(track.name, filter=EVERYTHING))
        else:
            subscription = await session.subscribe(track.name, fill=Fill(filter=EVERYTHING))
            taking = asyncio.ensure_future(digest_of(subscription))
            for group in range(groups // 2, groups):
                filled(track, [group], per_group, OBJECT)
                await asyncio.sleep(0)
            track.close(DoneCode.TRACK_ENDED)
            digest, items = await taking
            assert subscription.done is not None
            assert subscription.done.stream_count == groups // 2 + 1
        check_exactly_once(track, objects(items))
        assert digest == digest_of_track(track)
        assert sum(len(item.payload) for item in objects(items)) == 32 * 1024 * 1024


async def test_two_clients_at_once(certificates: Certificates) -> None:
    """One of them leaves in the middle; the other does not notice."""
    track = make_track(b"k")
    filled(track, range(4), 8, OBJECT)
    async with serving(certificates, track) as server:

        async def whole() -> None:
            async with moqt.connect(uri(server), ca=certificates.ca) as session:
                digest, _ = await digest_of(await session.fetch(track.name, filter=EVERYTHING))
                assert digest == digest_of_track(track)

        async def leaves() -> None:
            async with (
                moqt.connect(uri(server), ca=certificates.ca) as session,
                await session.fetch(track.name, filter=EVERYTHING) as fetch,
            ):
                assert isinstance(await anext(fetch), ReceivedObject)

        async with asyncio.TaskGroup() as group:
            group.create_task(whole())
            group.create_task(leaves())
        await until(lambda: not server.sessions)
        await whole()


async def test_a_client_that_publishes(certificates: Certificates) -> None:
    """The side that dialled publishes and announces; the side that listens subscribes."""
    track = make_track(b"k")
    filled(track, range(3), 2, 1000)
    offered = Tracks()
    offered.add(track)
    offered.announce(track.name.namespace)
    got: asyncio.Queue[list[Item]] = asyncio.Queue()

    async def take(session: moqt.Session) -> None:
        subscription = await session.subscribe(track.name, fill=Fill(filter=EVERYTHING))
        offered.remove(track.name, DoneCode.TRACK_ENDED)
        got.put_nowait([item async for item in subscription])

    async with (
        serving(certificates, on_session=take) as server,
        moqt.connect(uri(server), ca=certificates.ca, tracks=offered),
    ):
        check_exactly_once(track, objects(await got.get()))
        (session,) = server.sessions
        await until(lambda: track.name.namespace in session.peer_namespaces)


# Ends.


async def test_the_client_sees_the_code_of_the_servers_close(certificates: Certificates) -> None:
    track = make_track(b"k")
    filled(track, range(1), 1, 1000)

    async def hang_up(session: moqt.Session) -> None:
        await until(lambda: bool(track._watchers))
        await session.close(0x77, "enough for today")

    async with (
        serving(certificates, track, on_session=hang_up) as server,
        moqt.connect(uri(server), ca=certificates.ca) as session,
    ):
        subscription = await session.subscribe(track.name)
        with pytest.raises(SessionClosed) as caught:
            await anext(subscription)
        assert (caught.value.code, caught.value.reason, caught.value.remote) == (
            0x77,
            "enough for today",
            True,
        )
        error = await session.wait_closed()
        assert isinstance(error, SessionClosed)
        assert error.code == 0x77
        with pytest.raises(SessionClosed):
            await session.fetch(track.name, filter=EVERYTHING)


async def test_the_server_sees_the_code_of_the_clients_close(certificates: Certificates) -> None:
    ends: asyncio.Queue[moqt.MoqtError] = asyncio.Queue()

    async def note(session: moqt.Session) -> None:
        ends.put_nowait(await session.wait_closed())

    async with serving(certificates, on_session=note) as server:
        async with moqt.connect(uri(server), ca=certificates.ca) as session:
            await session.close(0x78, "bye")
        end = await ends.get()
        assert isinstance(end, SessionClosed)
        assert (end.code, end.reason, end.remote) == (0x78, "bye", True)


async def test_a_server_that_ends_closes_its_sessions(certificates: Certificates) -> None:
    async with serving(certificates) as server, moqt.connect(uri(server), ca=certificates.ca) as session:
        await server.close()
        error = await session.wait_closed()
        assert isinstance(error, SessionClosed)
        assert error.remote
        with pytest.raises(ConnectionLost, match="nothing listens"):
            async with moqt.connect(uri(server, "127.0.0.1"), ca=certificates.ca):
                pass


async def test_an_error_in_the_block_closes_the_session(certificates: Certificates) -> None:
    async with serving(certificates) as server:
        with pytest.raises(KeyError):
            async with moqt.connect(uri(server), ca=certificates.ca):
                raise KeyError("of the caller")
        await until(lambda: not server.sessions)


# Failures leave nothing behind.


async def test_the_wrong_ca(certificates: Certificates, nothing_left: Callable[[], None]) -> None:
    async with serving(certificates) as server:
        for ca in (certificates.other_ca, None):
            with pytest.raises(ConnectionLost, match="right CA file"):
                async with moqt.connect(uri(server), ca=ca):
                    pass
        assert not server.sessions
    nothing_left()


async def test_the_wrong_name(certificates: Certificates, nothing_left: Callable[[], None]) -> None:
    """The names that the certificate is made for are told as they are written when dialling."""
    async with serving(certificates) as server:
        with pytest.raises(ConnectionLost) as lost:
            await dial("127.0.0.1", server.port, alpn=["moqt-22"], ca=certificates.ca, server_name="relay-1")
    assert "hostname 'relay-1' doesn't match either of localhost, 127.0.0.1, ::1: " in str(lost.value)
    nothing_left()


async def test_files_named_by_text(certificates: Certificates) -> None:
    """Certificate, key and CA may be `str`, as those who type them write them."""
    chain, key, ca = map(str, (certificates.chain, certificates.key, certificates.ca))
    async with (
        moqt.serve("127.0.0.1", 0, certificate=chain, key=key) as server,
        moqt.connect(uri(server, "127.0.0.1"), ca=ca) as session,
    ):
        assert not session.closed
    with pytest.raises(UsageError, match=r"^nowhere\.pem: No such file"):
        async with moqt.serve("127.0.0.1", 0, certificate="nowhere.pem", key=key):
            pass


async def test_a_ca_file_that_is_none(
    certificates: Certificates, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    with pytest.raises(UsageError, match=r"missing\.pem"):
        async with moqt.connect("moqt://127.0.0.1:1/", ca=tmp_path / "missing.pem"):
            pass
    for wrong in ("https://127.0.0.1/", "moqt://", "127.0.0.1:4433"):
        with pytest.raises(UsageError):
            async with moqt.connect(wrong, ca=certificates.ca):
                pass
    nothing_left()


async def test_a_port_with_nobody(certificates: Certificates, nothing_left: Callable[[], None]) -> None:
    sock, port = udp_port()
    sock.close()
    with pytest.raises(ConnectionLost, match=f"nothing listens on UDP port {port}"):
        async with moqt.connect(f"moqt://127.0.0.1:{port}/", ca=certificates.ca, deadline=60):
            pass
    nothing_left()


async def test_a_port_that_is_silent(certificates: Certificates, nothing_left: Callable[[], None]) -> None:
    sock, port = udp_port()
    with sock, pytest.raises(DeadlineExceeded, match="is the server running"):
        async with moqt.connect(f"moqt://127.0.0.1:{port}/", ca=certificates.ca, deadline=0.1):
            pass
    nothing_left()


def configuration(certificates: Certificates, alpn: str, *, client: bool) -> QuicConfiguration:
    """For stock aioquic."""
    made = QuicConfiguration(is_client=client, alpn_protocols=[alpn], max_datagram_frame_size=65536)
    if client:
        made.load_verify_locations(str(certificates.ca))
    else:
        made.load_cert_chain(str(certificates.chain), str(certificates.key))
    return made


async def test_a_server_of_another_protocol(
    certificates: Certificates, nothing_left: Callable[[], None]
) -> None:
    sock, port = udp_port()
    sock.close()
    other = await stock_serve(
        "127.0.0.1", port, configuration=configuration(certificates, "h3", client=False)
    )
    with pytest.raises(ConnectionLost, match="different versions of MOQT"):
        async with moqt.connect(f"moqt://127.0.0.1:{port}/", ca=certificates.ca):
            pass
    other.close()
    await asyncio.sleep(0)
    nothing_left()


async def test_a_client_of_another_protocol(certificates: Certificates) -> None:
    """It is refused by TLS; the server serves the next client."""
    track = make_track(b"k")
    filled(track, range(1), 1, 1000)
    async with serving(certificates, track) as server:
        with pytest.raises(ConnectionError):
            async with stock_connect(
                "127.0.0.1", server.port, configuration=configuration(certificates, "moqt-99", client=True)
            ):
                pass
        assert not server.sessions
        async with moqt.connect(uri(server), ca=certificates.ca) as session:
            assert (await session.track_status(track.name)).largest == track.largest


async def test_a_server_that_never_sets_up(
    certificates: Certificates, nothing_left: Callable[[], None]
) -> None:
    """QUIC works, MOQT does not: the deadline of connect ends it."""
    connections: list[Connection] = []
    mute = await listen(
        "127.0.0.1",
        0,
        certificate=certificates.chain,
        key=certificates.key,
        alpn=["moqt-22"],
        on_connection=connections.append,
    )
    with pytest.raises(DeadlineExceeded):
        async with moqt.connect(f"moqt://127.0.0.1:{mute.port}/", ca=certificates.ca, deadline=0.5):
            pass
    (connection,) = connections
    assert (await connection.wait_closed()).application  # It was told.
    mute.close()
    await mute.wait_closed()
    nothing_left()


async def test_connect_cancelled_while_it_dials(
    certificates: Certificates, nothing_left: Callable[[], None]
) -> None:
    async with serving(certificates) as server:

        async def dial() -> None:
            async with moqt.connect(uri(server), ca=certificates.ca) as session:
                await session.wait_closed()

        for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
            task = asyncio.create_task(dial())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with moqt.connect(uri(server), ca=certificates.ca) as session:
            assert not session.closed
    nothing_left()


async def test_a_namespace_is_found(certificates: Certificates) -> None:
    track = make_track(b"k")
    offered = Tracks()
    offered.add(track)
    async with (
        moqt.serve(
            "127.0.0.1", 0, certificate=certificates.chain, key=certificates.key, tracks=offered
        ) as server,
        moqt.connect(uri(server, "127.0.0.1"), ca=certificates.ca) as session,
        await session.subscribe_namespace(track.name.namespace[:1]) as watch,
    ):
        offered.announce(track.name.namespace)
        assert await anext(watch) == moqt.NamespaceEvent(track.name.namespace, True)
        offered.withdraw(track.name.namespace)
        assert await anext(watch) == moqt.NamespaceEvent(track.name.namespace, False)
        beyond = LocationFilter.groups(3, 4)
        with pytest.raises(moqt.RequestRejected, match="nothing is published"):
            await session.fetch(track.name, filter=beyond)
