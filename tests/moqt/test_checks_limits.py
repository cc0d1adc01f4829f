"""Checks 31, 32, 34 and 35 of moqt 20, the limits of moqt 18, and what was seen on the wire (moqt 26.7).

Each test has its number in its name. The peer is raw: it writes bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moqt.errors import (
    RequestCode,
    ResetCode,
    SessionClosed,
    SessionCode,
)
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.subscribing import StreamEnd
from moqt.track import Track
from moqt.wire import (
    AliasType,
    Fetch,
    Parameters,
    PropertyType,
    Publish,
    PublishDone,
    PublishNamespace,
    RequestError,
    RequestOk,
    RequestUpdate,
    SetupOptions,
    SubgroupEncoder,
    SubgroupHeader,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    Token,
    TrackStatus,
)
from tests.moqt.ends import NAME, NAMESPACE, hostile, publish_groups
from tests.moqt.raw import (
    V,
    both_roles,
    check_closed,
    check_lives,
    check_refused,
    framed,
    subgroup,
    subscribe,
    subscribed,
    unset,
)

pytestmark = pytest.mark.virtual

# 31 and 32: SETUP.


@pytest.mark.parametrize(
    ("peer_dials", "options", "code"),
    [
        pytest.param(False, "01022f61", SessionCode.INVALID_PATH, id="PATH from a server"),
        pytest.param(False, "0100", SessionCode.INVALID_PATH, id="empty PATH from a server"),
        pytest.param(False, "050161", SessionCode.INVALID_AUTHORITY, id="AUTHORITY from a server"),
        pytest.param(True, "010161", SessionCode.MALFORMED_PATH, id="PATH without slash"),
        pytest.param(True, "01022f20", SessionCode.MALFORMED_PATH, id="PATH with a space"),
        pytest.param(True, "0504613a3a62", SessionCode.MALFORMED_AUTHORITY, id="AUTHORITY a::b"),
        pytest.param(True, "0500", SessionCode.MALFORMED_AUTHORITY, id="empty AUTHORITY"),
        pytest.param(True, "03020007", V, id="DELETE at a server"),
        pytest.param(True, "03020207", V, id="USE_ALIAS at a server"),
        pytest.param(
            True,
            "030401070061" + "000401070062",
            SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS,
            id="alias registered twice",
        ),
        pytest.param(False, "03020207", SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS, id="USE_ALIAS at a client"),
        pytest.param(True, "0303030061" + "0003030061", V, id="5: the same token twice"),
    ],
)
async def test_31_32_setup(peer_dials: bool, options: str, code: SessionCode) -> None:
    async with unset(peer_dials=peer_dials) as (starting, session, peer):
        await peer.send(framed(0x2F00, bytes.fromhex(options)))
        with pytest.raises(SessionClosed) as caught:
            await starting
        assert caught.value.code == code
        await check_closed(session, peer, code)


def status_with(number: int, *tokens: Token) -> TrackStatus:
    return TrackStatus(number, NAME, Parameters(tokens=tokens))


def registered(alias: int, value: bytes) -> Token:
    return Token(AliasType.REGISTER, alias, 0, value)


async def test_32_alias_registered_twice() -> None:
    async with hostile() as (session, peer):
        await peer.ask(status_with(peer.id(), registered(7, b"a")))
        await peer.ask(status_with(peer.id(), registered(7, b"b")))
        await check_closed(session, peer, SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS)


@pytest.mark.parametrize(("size", "closes"), [(84, False), (85, True)])
async def test_32_cache_overflow(size: int, closes: bool) -> None:
    """18: Σ (16 + length) over the live aliases is bounded by what we told."""
    async with hostile(limits=Limits(max_auth_token_cache_size=100)) as (session, peer):
        talk = await peer.ask(status_with(peer.id(), registered(7, bytes(size))), fin=True)
        if closes:
            await check_closed(session, peer, SessionCode.AUTH_TOKEN_CACHE_OVERFLOW)
        else:
            assert isinstance(await talk.next(), RequestOk)


async def test_32_without_a_cache() -> None:
    """S19: REGISTER where the limit is 0."""
    async with hostile(limits=Limits(max_auth_token_cache_size=0)) as (session, peer):
        await peer.ask(status_with(peer.id(), registered(7, b"")))
        await check_closed(session, peer, SessionCode.AUTH_TOKEN_CACHE_OVERFLOW)


async def test_32_unknown_alias_costs_the_request() -> None:
    """S19."""
    async with hostile() as (_, peer):
        talk = await peer.ask(status_with(peer.id(), Token(AliasType.USE_ALIAS, 77)), fin=True)
        await check_refused(talk, RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS)
        await check_lives(peer)


# 34 and 35: what costs the request alone.


def filtered(
    request_id: int, *filters: RangeFilter, fill: tuple[RangeFilter, ...] | None = None
) -> Subscribe:
    inner = None if fill is None else Parameters(range_filters=fill)
    return Subscribe(request_id, NAME, Parameters(range_filters=filters, fill=inner))


def object_ids(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(RangeKind.OBJECTID, ranges, set_id)


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param("280400790101", id="X35 odd property type"),
        pytest.param("2703008100", id="priority above 255"),
        pytest.param("260b00" + "ff" * 9 + "01", id="value above 2^64-1"),
        pytest.param("260100", id="no range"),
        pytest.param("26050003020505" + "0003000001", id="the same filter twice"),
    ],
)
async def test_34_range_filters(parameters: str) -> None:
    async with hostile() as (_, peer):
        count = 2 if parameters.endswith("0003000001") else 1
        talk = await peer.ask(subscribe(peer.id(), parameters, count=count), kind=Subscribe)
        await check_refused(talk, RequestCode.INVALID_FILTER)
        await check_lives(peer)


@pytest.mark.parametrize(
    ("count", "fill", "refused"), [(16, None, False), (17, None, True), (0, 16, False), (0, 17, True)]
)
async def test_34_number_of_ranges(count: int, fill: int | None, refused: bool) -> None:
    """S20; the limit is ours, MAX_FILTER_RANGES."""

    def ranges(number: int) -> tuple[RangeFilter, ...]:
        return (object_ids(*((2 * n, 2 * n) for n in range(number))),) if number else ()

    async with hostile(limits=Limits(max_filter_ranges=16)) as (_, peer):
        message = filtered(peer.id(), *ranges(count), fill=None if fill is None else ranges(fill))
        talk = await peer.ask(message)
        if refused:
            await check_refused(talk, RequestCode.INVALID_FILTER)
        else:
            assert isinstance(await talk.next(), SubscribeOk)
        await check_lives(peer)


async def test_34_fetch_and_update() -> None:
    track = Track(NAME)
    publish_groups(track, [0], 2)
    bad = object_ids((5, 5), (6, 7), (9, None))
    async with hostile(track=track, limits=Limits(max_filter_ranges=2)) as (_, peer):
        talk = await peer.ask(Fetch(peer.id(), NAME, Parameters(range_filters=(bad,))))
        await check_refused(talk, RequestCode.INVALID_FILTER)
        talk = await peer.ask(
            Subscribe(peer.id(), NAME), RequestUpdate(peer.id(), Parameters(range_filters=(bad,)))
        )
        assert isinstance(await talk.next(), SubscribeOk)
        answer = await talk.next()
        assert isinstance(answer, RequestError)
        assert answer.code == RequestCode.INVALID_FILTER
        assert await talk.next() == PublishDone(0x8, 0, "")
        assert await talk.next() is None
        await check_lives(peer)


@both_roles
@pytest.mark.parametrize("namespace", [(b".",), (b".", b"x"), (b".session",), (b".session", b"x")])
@pytest.mark.parametrize(
    "kind", [Subscribe, Fetch, TrackStatus, Publish, PublishNamespace, SubscribeNamespace]
)
async def test_35_reserved_namespaces(
    peer_dials: bool, namespace: tuple[bytes, ...], kind: type[Any]
) -> None:
    """S17."""
    async with hostile(peer_dials=peer_dials) as (_, peer):
        what: Any = (
            namespace if kind in (PublishNamespace, SubscribeNamespace) else FullTrackName(namespace, b"")
        )
        alias = (1,) if kind is Publish else ()
        talk = await peer.ask(kind(peer.id(), what, *alias))
        await check_refused(talk, RequestCode.DOES_NOT_EXIST)
        await check_lives(peer)


async def test_35_other_names_with_a_dot_are_the_applications() -> None:
    async with hostile() as (_, peer):
        talk = await peer.ask(SubscribeNamespace(peer.id(), (b".other",)))
        assert isinstance(await talk.next(), RequestOk)


# Limits of moqt 18 that are not among the checks.


async def test_18_limit_of_objects() -> None:
    """A larger Object is refused before it is buffered, and nothing else is."""
    limits = Limits(max_object_size=1000)
    async with subscribed(limits=limits, filter=LocationFilter.none()) as (_, peer, subscription, _talk):
        head = SubgroupEncoder(SubgroupHeader(1, 0, priority=128))
        big = await peer.send(head.header() + head.object(0, 1001) + bytes(10))
        await peer.send(subgroup((0, bytes(1000)), group=1), fin=True)
        items = [await anext(subscription) for _ in range(3)]
        assert StreamEnd(0, False, ResetCode.EXCESSIVE_LOAD) in items
        await check_lives(peer)
        assert big.stopped == ResetCode.EXCESSIVE_LOAD


async def test_18_memory_is_not_taken_for_a_promise() -> None:
    """The header of a large Object costs no more than 1 MiB until its bytes come."""
    async with subscribed(filter=LocationFilter.none()) as (session, peer, subscription, _talk):
        for group in range(20):
            head = SubgroupEncoder(SubgroupHeader(1, group, priority=128))
            await peer.send(head.header() + head.object(0, 64 * 1024 * 1024) + bytes(10))
        await asyncio.sleep(0.1)
        assert len(subscription._streams) == 20
        await check_lives(peer)
        assert not session.closed


async def test_18_open_requests() -> None:
    async with hostile(limits=Limits(max_requests=3, retry_after=2.5)) as (_, peer):
        talks = [await peer.ask(Subscribe(peer.id(), NAME)) for _ in range(3)]
        for talk in talks:
            assert isinstance(await talk.next(), SubscribeOk)
        answer = await check_refused(await peer.ask(Subscribe(peer.id(), NAME)), RequestCode.EXCESSIVE_LOAD)
        assert answer.retry_after == 2.5
        talks[0].stream.reset(1)
        await asyncio.sleep(0.1)
        assert isinstance(await (await peer.ask(Subscribe(peer.id(), NAME))).next(), SubscribeOk)


# What was observed on the wire (moqt 26.7), as far as an endpoint is concerned and no check above shows it.


async def test_s02_s03_s07_s08() -> None:
    track = Track(NAME, properties=((PropertyType.MAX_CACHE_DURATION, 600000),))
    publish_groups(track, range(3), 1)
    async with hostile(track=track) as (session, peer):
        talk = await peer.ask(bytes.fromhex("0600100002066b7663732d310573636f706500"))
        assert await talk.stream.read() == bytes.fromhex("07000100")
        session.tracks.announce(NAMESPACE)
        talk = await peer.ask(bytes.fromhex("50000a0201066b7663732d3100"))
        await asyncio.sleep(0.1)
        assert await talk.stream.read() == bytes.fromhex("07000100080007010573636f7065")
        talk = await peer.ask(bytes.fromhex("0d00150402066b7663732d310573636f7065046e6f706500"), fin=True)
        assert (await talk.stream.read()).startswith(bytes.fromhex("0500"))
        assert await talk.stream.read() == b""
        talk = await peer.ask(bytes.fromhex("0d00130602066b7663732d310573636f7065026b3000"), fin=True)
        assert await talk.stream.read() == bytes.fromhex("0700080109020004c927c0")
        assert await talk.stream.read() == b""


async def test_s04_subscribe_with_a_fill() -> None:
    track = Track(NAME, one_subgroup=True)
    for group in range(2):
        for number in range(2):
            track.append(group, number, f"g{group}o{number}".encode())
        track.end_group(group, 2)
    async with hostile(track=track) as (_, peer):
        await peer.connection.accept()  # The control stream.
        talk = await peer.ask(bytes.fromhex("03001c0002066b7663732d310573636f7065026b3002210502050121020000"))
        assert await talk.stream.read() == bytes.fromhex("0400050001090101")
        fill = await peer.connection.accept()
        await asyncio.sleep(0.1)
        records = "1c0000800467306f30" + "000467306f31" + "0c00000467316f30" + "000467316f31"
        assert await fill.read() == bytes.fromhex("0500" + records)
        assert await fill.read() == b""


async def test_s06_fetch_with_object_ids() -> None:
    track = Track(NAME, one_subgroup=True)
    for group in range(3):
        for number in range(2):
            track.append(group, number, f"g{group}o{number}".encode())
        track.end_group(group, 2)
    async with hostile(track=track) as (_, peer):
        await peer.connection.accept()
        talk = await peer.ask(
            bytes.fromhex("16001f0002066b7663732d310573636f7065026b3003210301000101010403000000"),
            fin=True,
        )
        data = await peer.connection.accept()
        await asyncio.sleep(0.1)
        assert await talk.stream.read() == bytes.fromhex("18000400020100")
        assert await talk.stream.read() == b""
        assert await data.read() == bytes.fromhex("0500" + "1c0100800467316f30" + "0c00000467326f30")
        assert await data.read() == b""


async def test_s10_s11_fills_of_updates() -> None:
    track = Track(NAME, one_subgroup=True)
    for group in range(2):
        for number in range(2):
            track.append(group, number, f"g{group}o{number}".encode())
        track.end_group(group, 2)
    backwards = Parameters(
        fill=Parameters(
            location_filter=LocationFilter.absolute_range(Location(0, 1), Location(1, 0)),
            group_order=GroupOrder.DESCENDING,
        )
    )
    async with hostile(track=track) as (_, peer):
        await peer.connection.accept()
        talk = await peer.ask(Subscribe(0, NAME, Parameters(location_filter=LocationFilter.next_object())))
        assert isinstance(await talk.next(), SubscribeOk)
        await talk.say(bytes.fromhex("0200050401230100"))
        assert await talk.next() == RequestOk(Parameters(largest=Location(1, 1)))
        # Next Object and an empty fill: no stream (moqt 7.2 #4); the next one is that of the second fill.
        await talk.say(RequestUpdate(6, backwards))
        assert await talk.next() == RequestOk(Parameters(largest=Location(1, 1)))
        fill = await peer.connection.accept()
        await asyncio.sleep(0.1)
        assert await fill.read() == bytes.fromhex("0506" + "1c0100800467316f30" + "0c00010467306f31")
        assert await fill.read() == b""
        await talk.stream.write(b"", fin=True)


async def test_s16_grease_byte_by_byte() -> None:
    """A reader may get everything byte by byte."""
    async with unset() as (starting, session, peer):
        control = await peer.send(b"")
        for byte in bytes.fromhex("af000007809d02dead7f05"):
            await control.write(bytes((byte,)))
        await starting
        assert session.peer_setup == SetupOptions()
