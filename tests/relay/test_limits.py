"""The relay's limits as its options set them: what the peer sees, and that others feel nothing.

That each limit does what it says is shown where it is made: tests/moqt/test_limits.py, test_checks_limits.py,
test_fetch.py, test_fill.py, tests/quic/test_udp.py, tests/relay/test_faults.py (TOO_FAR_BEHIND).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import moqt
from moqt import FullTrackName, LocationFilter, RequestRejected, Track, Tracks
from moqt.errors import DeadlineExceeded, RequestCode, SessionClosed, SessionCode
from moqt.relay.config import Settings
from tests.relay.running import running_relay

if TYPE_CHECKING:
    from tests.conftest import Certificates

NAMESPACE = (b"n",)
NAME = FullTrackName(NAMESPACE, b"t")


def settings(certificates: Certificates, **options: Any) -> Settings:
    return Settings(listen="localhost:0", cert=certificates.chain, key=certificates.key, **options)


def test_each_option_arrives_where_it_counts(certificates: Certificates) -> None:
    made = settings(
        certificates,
        max_connections=11,
        max_connections_per_address=12,
        retry="load",
        handshake_deadline=1.5,
        setup_deadline=2.5,
        max_requests=13,
        max_request_rate=13.5,
        max_announcements=14,
        max_prefixes=15,
        max_fetches=16,
        max_fills=17,
        max_data_streams=18,
        max_object_size=19,
        receive_window=1 << 20,
        max_behind=1 << 21,
        max_partial=1 << 22,
        datagram_size=1300,
    )
    listening, limits, options = made.listening, made.limits, made.options
    assert (listening.connections, listening.connections_per_address) == (11, 12)
    assert (listening.retry, listening.handshake_seconds) == ("load", 1.5)
    assert (limits.setup_deadline, limits.max_requests, limits.request_rate) == (2.5, 13, 13.5)
    assert (limits.max_announcements, limits.max_prefixes) == (14, 15)
    assert (limits.max_fetches, limits.max_fills) == (16, 17)
    assert (limits.max_object_size, limits.max_behind, limits.max_partial) == (19, 1 << 21, 1 << 22)
    assert (options.max_uni_streams, options.max_bidi_streams) == (18, 29)
    assert (options.max_data, options.max_stream_data) == (1 << 20, 1 << 18)
    assert options.max_datagram_size == 1300


@pytest.mark.parametrize("option", ["max_connections", "max_connections_per_address"])
async def test_connections(certificates: Certificates, option: str) -> None:
    """One too many gets no answer; who is here goes on, and when one has left there is room."""
    async with (
        running_relay(certificates, **{option: 2}) as relay,
        moqt.connect(relay.uri, ca=certificates.ca) as first,
        moqt.connect(relay.uri, ca=certificates.ca) as second,
    ):
        with pytest.raises(DeadlineExceeded):
            async with moqt.connect(relay.uri, ca=certificates.ca, deadline=0.5):
                pass
        for session in (first, second):
            with pytest.raises(RequestRejected):
                await session.track_status(NAME)
        await first.close()
        async with moqt.connect(relay.uri, ca=certificates.ca) as third:
            with pytest.raises(RequestRejected):
                await third.track_status(NAME)


async def test_requests(certificates: Certificates) -> None:
    """One too many is answered, though QUIC bounds streams too; others have their own."""
    async with (
        running_relay(certificates, max_requests=2) as relay,
        moqt.connect(relay.uri, ca=certificates.ca) as session,
        moqt.connect(relay.uri, ca=certificates.ca) as other,
    ):
        watches = [await session.subscribe_namespace((bytes([number]),)) for number in range(1, 3)]
        for _ in range(20):
            with pytest.raises(RequestRejected) as error:
                await session.subscribe_namespace((b"x",))
            assert error.value.code == RequestCode.EXCESSIVE_LOAD
            assert error.value.retry_after == 1.0
        await other.subscribe_namespace((b"x",))
        await watches[0].close()
        async with asyncio.timeout(10):
            while True:
                try:
                    await session.subscribe_namespace((b"x",))
                    break
                except RequestRejected:
                    await asyncio.sleep(0)


async def test_object_size(certificates: Certificates) -> None:
    """A larger Object does not come through; the next ones do."""
    tracks = Tracks()
    track = Track(NAME, one_subgroup=True)
    tracks.add(track)
    tracks.announce(NAMESPACE)
    async with (
        running_relay(certificates, max_object_size=1000) as relay,
        moqt.connect(relay.uri, ca=certificates.ca, tracks=tracks),
        moqt.connect(relay.uri, ca=certificates.ca) as session,
        await session.subscribe_namespace(NAMESPACE) as watch,
    ):
        await anext(watch)
        subscription = await session.subscribe(NAME, filter=LocationFilter.next_object())
        track.append(0, 0, bytes(1001))
        track.append(1, 0, bytes(1000))
        async with asyncio.timeout(10):
            while not isinstance(item := await anext(subscription), moqt.ReceivedObject):
                pass
        assert item.location.group == 1


async def test_what_is_not_served(certificates: Certificates) -> None:
    """moqt 20 #31."""
    async with running_relay(certificates, served_host=("LocalHost",), served_path=("/moq",)) as relay:
        port = relay.uri.rpartition(":")[2]
        for uri, code in (
            (f"moqt://127.0.0.1:{port}/moq", SessionCode.INVALID_AUTHORITY),
            (f"moqt://localhost:{port}/other", SessionCode.INVALID_PATH),
        ):
            with pytest.raises(SessionClosed) as error:
                async with moqt.connect(uri, ca=certificates.ca) as session:
                    raise await session.wait_closed()
            assert error.value.code == code
        async with moqt.connect(f"moqt://localhost:{port}/moq?x=1", ca=certificates.ca) as session:
            with pytest.raises(RequestRejected):
                await session.track_status(NAME)
