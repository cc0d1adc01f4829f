"""What a hostile peer says on control and request streams, and how the session takes it:
checks 9 to 18 of moqt 20.

Each test has its number of the table in its name. The peer is raw: it writes bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moqt.errors import (
    ProtocolError,
    RequestCode,
    RequestRejected,
    SessionClosed,
    SessionCode,
)
from moqt.filters import Location
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.wire import (
    FetchOk,
    Goaway,
    Message,
    Namespace,
    PublishDone,
    PublishNamespace,
    PublishStateNotify,
    Redirect,
    RequestError,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    encode,
    encode_vi64,
)
from tests.moqt.ends import NAME, NAMESPACE, OTHER, hostile, take
from tests.moqt.raw import (
    TOP,
    V,
    both_roles,
    check_closed,
    check_lives,
    check_refused,
    framed,
    make_request,
    names,
    prefixed,
    subgroup,
    subscribe,
    subscribe_at,
    subscribed,
    unset,
)

pytestmark = pytest.mark.virtual

# 9 and 10: Key-Value-Pairs and tokens.


@both_roles
@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param("0400" + "ff" * 9 + "00", V, id="9: X23 type overflow"),
        pytest.param("9d", V, id="9: cut"),
        pytest.param("8f" + "ff", V, id="9: cut number"),
        pytest.param("07" + "c10000", V, id="9: value of 65536 bytes"),
        pytest.param("0700" + "0000", V, id="9: option repeated"),
        pytest.param("0701ff", SessionCode.KEY_VALUE_FORMATTING_ERROR, id="10: no UTF-8"),
        pytest.param("030109", SessionCode.KEY_VALUE_FORMATTING_ERROR, id="10: token of type 9"),
        pytest.param("0300", SessionCode.KEY_VALUE_FORMATTING_ERROR, id="10: empty token"),
        pytest.param("03020700", SessionCode.KEY_VALUE_FORMATTING_ERROR, id="10: unknown Alias Type"),
    ],
)
async def test_9_10_setup_options(peer_dials: bool, options: str, code: SessionCode) -> None:
    async with unset(peer_dials=peer_dials) as (starting, session, peer):
        await peer.send(framed(0x2F00, bytes.fromhex(options)))
        with pytest.raises(SessionClosed):
            await starting
        await check_closed(session, peer, code)


@both_roles
@pytest.mark.parametrize(
    "options",
    [
        pytest.param("809d02dead7f05", id="C06 grease"),
        pytest.param("809d000000", id="X25 unknown option repeated"),
        pytest.param("0703782f310104", id="C03"),
        pytest.param("0303030074" + "0003030075", id="two tokens"),
    ],
)
async def test_9_legal_setup_options(peer_dials: bool, options: str) -> None:
    async with hostile(peer_dials=peer_dials, setup=framed(0x2F00, bytes.fromhex(options))) as (_, peer):
        await check_lives(peer)


@pytest.mark.parametrize("token", ["09", "01", "02", "0107", "04", ""])
async def test_10_token_of_a_request(token: str) -> None:
    """X29 and its kin."""
    async with hostile() as (session, peer):
        await peer.ask(subscribe(peer.id(), (b"\x03" + prefixed(bytes.fromhex(token))).hex()))
        await check_closed(session, peer, SessionCode.KEY_VALUE_FORMATTING_ERROR)


@pytest.mark.parametrize("properties", ["0400" + "ff" * 9 + "00", "0bc10000", "0b05", "04"])
async def test_9_track_properties(properties: str) -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(framed(0x04, b"\x01\x00" + bytes.fromhex(properties)))
        await check_closed(session, peer, V)
        await asyncio.gather(asking, return_exceptions=True)


async def test_10_track_property_of_a_known_type() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(framed(0x04, b"\x01\x00" + bytes.fromhex("0e8100")))  # DEFAULT_PUBLISHER_PRIORITY 256
        await check_closed(session, peer, SessionCode.KEY_VALUE_FORMATTING_ERROR)
        await asyncio.gather(asking, return_exceptions=True)


# 11 and 12: names and texts.


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((b"a",) * 33, id="X18 33 fields"),
        pytest.param((b"a", b""), id="X19 empty field"),
        pytest.param((b"n" * 4000, b"n" * 97), id="4097 bytes"),
    ],
)
@pytest.mark.parametrize("kind", [0x03, 0x16, 0x0D, 0x1D, 0x06, 0x50, 0x51])
async def test_11_namespaces(kind: int, fields: tuple[bytes, ...]) -> None:
    async with hostile() as (session, peer):
        name = names(fields, b"") if kind in (0x03, 0x16, 0x0D, 0x1D) else names(fields, b"")[:-1]
        alias = b"\x01" if kind == 0x1D else b""
        await peer.ask(framed(kind, encode_vi64(peer.id()) + name + alias + b"\x00"))
        await check_closed(session, peer, V)


@pytest.mark.parametrize(("length", "closes"), [(97, True), (96, False)])
async def test_11_full_track_name(length: int, closes: bool) -> None:
    """X20 and X21."""
    async with hostile() as (session, peer):
        body = encode_vi64(peer.id()) + names((b"n" * 4000,), b"n" * length) + b"\x00"
        talk = await peer.ask(framed(0x03, body), kind=Subscribe)
        if closes:
            await check_closed(session, peer, V)
        else:
            await check_refused(talk, RequestCode.DOES_NOT_EXIST)


async def test_11_a_suffix_that_makes_a_namespace_too_long() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace((b"n" * 4000,)))
        talk, _ = await peer.request()
        await talk.say(RequestOk(), Namespace((b"n" * 96,)), Namespace((b"n" * 97,)))
        watch = await asking
        await check_closed(session, peer, V)
        assert list(watch.namespaces) == [(b"n" * 4000, b"n" * 96)]


@pytest.mark.parametrize(("length", "closes"), [(1024, False), (1025, True)])
async def test_12_reason(length: int, closes: bool) -> None:
    """X27."""
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(framed(0x05, b"\x10\x00" + prefixed(b"r" * length)), fin=True)
        if closes:
            await check_closed(session, peer, V)
            await asyncio.gather(asking, return_exceptions=True)
        else:
            with pytest.raises(RequestRejected):
                await asking
            await check_lives(peer)


@pytest.mark.parametrize("where", ["control", "request"])
@pytest.mark.parametrize(("length", "closes"), [(8192, False), (8193, True)])
async def test_12_uri_of_goaway(where: str, length: int, closes: bool) -> None:
    """X28, from a server."""
    async with hostile(peer_dials=False) as (session, peer):
        goaway = framed(0x10, prefixed(b"u" * length) + b"\x00")
        if where == "control":
            assert peer.control is not None
            await peer.control.write(goaway)
        else:
            await peer.ask(encode(SubscribeNamespace(peer.id(), (b"x",))) + goaway)
        if closes:
            await check_closed(session, peer, V)
        else:
            await check_lives(peer)


# 13 and 14: GOAWAY and Redirect.


@pytest.mark.parametrize("where", ["control", "request", "reply"])
async def test_13_a_server_gets_a_uri_in_goaway(where: str) -> None:
    async with hostile() as (session, peer):
        goaway = encode(Goaway("moqt://b.example/"))
        if where == "control":
            assert peer.control is not None
            await peer.control.write(goaway)
        elif where == "request":
            await peer.ask(encode(Subscribe(peer.id(), NAME)) + goaway)
        else:
            asking = asyncio.ensure_future(session.subscribe(NAME))
            talk, _ = await peer.request()
            await talk.say(goaway)
            await asyncio.gather(asking, return_exceptions=True)
        await check_closed(session, peer, V)


@both_roles
@pytest.mark.parametrize("where", ["control", "request", "reply"])
async def test_13_second_goaway(peer_dials: bool, where: str) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        goaways = encode(Goaway()) * 2
        if where == "control":
            assert peer.control is not None
            await peer.control.write(goaways)
        elif where == "request":
            await peer.ask(encode(Subscribe(peer.id(), NAME)) + goaways)
        else:
            talk, _ = await subscribe_at(session, peer)
            await talk.say(goaways)
        await check_closed(session, peer, V)


@both_roles
async def test_13_one_goaway_on_each_stream_is_legal(peer_dials: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        assert peer.control is not None
        first, _ = await subscribe_at(session, peer)
        second, _ = await subscribe_at(session, peer, track=OTHER, alias=2)
        for write in (peer.control.write, first.stream.write, second.stream.write):
            await write(encode(Goaway()))
        await check_lives(peer)
        assert session.goaway_received.is_set()


def redirect(uri: str, name: bytes) -> RequestError:
    return RequestError(RequestCode.REDIRECT, 0, "", Redirect(uri, FullTrackName(NAMESPACE, name)))


async def test_13_a_server_gets_a_uri_in_a_redirect() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(redirect("moqt://b.example/", b"k0"))
        await check_closed(session, peer, V)
        await asyncio.gather(asking, return_exceptions=True)


async def test_13_a_client_gets_a_redirect() -> None:
    async with hostile(peer_dials=False) as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(redirect("moqt://b.example/", b"k0"), fin=True)
        with pytest.raises(RequestRejected) as caught:
            await asking
        assert caught.value.redirect == Redirect("moqt://b.example/", NAME)
        await check_lives(peer)


@both_roles
@pytest.mark.parametrize("kind", ["publish_namespace", "subscribe_namespace"])
@pytest.mark.parametrize(("name", "closes"), [(b"k0", True), (b"", False)])
async def test_14_redirect_of_a_namespace(peer_dials: bool, kind: str, name: bytes, closes: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        asking = asyncio.ensure_future(make_request(session, kind))
        talk, _ = await peer.request()
        await talk.say(redirect("", name), fin=True)
        if closes:
            await check_closed(session, peer, V)
        else:
            await check_lives(peer)
        await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(asking.exception(), ProtocolError if closes else RequestRejected)


# 15: Request IDs.


@both_roles
@pytest.mark.parametrize("how", ["parity", "repeat", "parity of an update", "repeat by an update"])
async def test_15_request_ids(peer_dials: bool, how: str) -> None:
    """S13 too."""
    async with hostile(peer_dials=peer_dials) as (session, peer):
        good = peer.id()
        match how:
            case "parity":
                await peer.ask(Subscribe(good + 1, NAME))
            case "repeat":
                await peer.ask(Subscribe(good, NAME))
                await peer.ask(TrackStatus(good, NAME))
            case "parity of an update":
                await peer.ask(Subscribe(good, NAME), RequestUpdate(good + 1))
            case _:
                await peer.ask(Subscribe(good, NAME), RequestUpdate(good))
        await check_closed(session, peer, SessionCode.INVALID_REQUEST_ID)


@both_roles
async def test_15_gaps_and_disorder_are_legal(peer_dials: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (_, peer):
        first = peer.id()
        top = TOP - 1 + first
        for number in (first + 10, first + 4, top, first + 2, first, top - 2):
            talk = await peer.ask(TrackStatus(number, NAME), fin=True)
            assert isinstance(await talk.next(), RequestOk)
        talk = await peer.ask(TrackStatus(first + 6, NAME), fin=True)
        assert isinstance(await talk.next(), RequestOk)


# 16: Track Aliases.


@both_roles
async def test_16_alias_of_another_track(peer_dials: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        await subscribe_at(session, peer, alias=7)
        with pytest.raises(ProtocolError):
            await subscribe_at(session, peer, track=OTHER, alias=7)
        await check_closed(session, peer, SessionCode.DUPLICATE_TRACK_ALIAS)


async def test_16_alias_that_is_free_again() -> None:
    async with hostile() as (session, peer):
        _, first = await subscribe_at(session, peer, alias=7)
        await first.close()
        _, second = await subscribe_at(session, peer, track=OTHER, alias=7)
        await peer.send(subgroup((0, b"x"), alias=7), fin=True)
        assert [item.payload for item in await take(second, 1)] == [b"x"]


# 17: who says what.


@pytest.mark.parametrize("message", [RequestUpdate(0), Namespace((b"a",)), FetchOk(False, Location(0, 0))])
async def test_17_wrong_from_a_responder(message: Message) -> None:
    async with subscribed() as (session, peer, _subscription, talk):
        await talk.say(message)
        await check_closed(session, peer, V)


@pytest.mark.parametrize("message", [PublishStateNotify(), SubscribeOk(1), PublishDone(2, 0), RequestOk()])
async def test_17_wrong_from_a_subscriber(message: Message) -> None:
    async with hostile() as (session, peer):
        await peer.ask(Subscribe(peer.id(), NAME), message)
        await check_closed(session, peer, V)


@pytest.mark.parametrize("kind", ["fetch", "subscribe_namespace", "publish_namespace"])
async def test_17_state_notify_of_no_subscription(kind: str) -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(make_request(session, kind))
        talk, _ = await peer.request()
        await talk.say(FetchOk(False, Location(0, 5)) if kind == "fetch" else RequestOk())
        await asking
        await talk.say(PublishStateNotify())
        await check_closed(session, peer, V)


async def test_17_update_of_a_track_status() -> None:
    async with hostile() as (session, peer):
        await peer.ask(TrackStatus(peer.id(), NAME), RequestUpdate(peer.id()))
        await check_closed(session, peer, V)


# 18: REQUEST_UPDATEs without an answer.


@pytest.mark.parametrize("kind", [Subscribe, SubscribeNamespace, PublishNamespace])
@pytest.mark.parametrize("limit", [1, 4, 16])
async def test_18_too_many_updates(kind: type[Any], limit: int) -> None:
    what: Any = NAME if kind is Subscribe else NAMESPACE
    limits = Limits(max_request_updates=limit)
    async with hostile(limits=limits) as (session, peer):
        first = kind(peer.id(), what)
        talk = await peer.ask(first, *(RequestUpdate(peer.id()) for _ in range(limit)))
        for _ in range(limit + 1):
            assert isinstance(await talk.next(), (SubscribeOk, RequestOk))
        await talk.say(*(RequestUpdate(peer.id()) for _ in range(limit + 1)))
        await check_closed(session, peer, SessionCode.TOO_MANY_REQUEST_UPDATES)


async def test_18_no_limit() -> None:
    """0 is what the peer is told, and means none (moqt 3.2)."""
    async with hostile(limits=Limits(max_request_updates=0)) as (_, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME), *(RequestUpdate(peer.id()) for _ in range(200)))
        assert isinstance(await talk.next(), SubscribeOk)
        for _ in range(200):
            assert isinstance(await talk.next(), RequestOk)
