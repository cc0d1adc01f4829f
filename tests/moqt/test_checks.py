"""What a hostile peer says on control and request streams, and how the session takes it: checks 1 to 8
and 19 to 22 of moqt 20.

Each test has its number of the table in its name. The peer is raw: it writes bytes.
"""

from __future__ import annotations

import asyncio

import pytest

from moqt.errors import (
    ProtocolError,
    SessionClosed,
)
from moqt.filters import Location
from moqt.subscribing import FetchStream
from moqt.wire import (
    REQUESTS,
    Fetch,
    FetchOk,
    Goaway,
    Message,
    Namespace,
    NamespaceDone,
    ObjectDatagram,
    PaddingDatagram,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    RequestError,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
    encode,
    encode_datagram,
    encode_vi64,
)
from tests.moqt.ends import NAME, NAMESPACE, hostile
from tests.moqt.raw import (
    TOP,
    V,
    both_roles,
    check_closed,
    check_lives,
    framed,
    make_request,
    names,
    subscribe,
    subscribed,
    unset,
)

pytestmark = pytest.mark.virtual

# 1: unknown types.


@both_roles
@pytest.mark.parametrize("kind", [0x00, 0x01, 0x20, 0x21, 0x40, 0x41, 0x1E, 0x99, 0x9D, 0x1234, TOP])
@pytest.mark.parametrize("first", [True, False])
async def test_1_unknown_message(peer_dials: bool, kind: int, first: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        data = framed(kind, b"")
        await peer.ask(data if first else encode(SubscribeNamespace(peer.id(), (b"x",))) + data)
        await check_closed(session, peer, V)


@both_roles
@pytest.mark.parametrize("kind", [0x99, 0x10 << 8])
async def test_1_unknown_message_on_the_control_stream(peer_dials: bool, kind: int) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        assert peer.control is not None
        await peer.control.write(framed(kind, b""))
        await check_closed(session, peer, V)


@both_roles
@pytest.mark.parametrize("kind", [0x00, 0x04, 0x06, 0x0F, 0x20, 0x80, 0x9D, 0x1234, 0x2F01, TOP])
async def test_1_unknown_stream(peer_dials: bool, kind: int) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        await peer.send(encode_vi64(kind))
        await check_closed(session, peer, V)


@both_roles
@pytest.mark.parametrize("kind", [0x10, 0x40, 0x9D, 0x1234, 0x132B3E2A])
async def test_1_unknown_datagram(peer_dials: bool, kind: int) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        peer.connection.send_datagram(encode_vi64(kind) + bytes(20))
        await check_closed(session, peer, V)


@both_roles
async def test_1_padding_and_objects_in_datagrams(peer_dials: bool) -> None:
    """S16: the session stays."""
    async with hostile(peer_dials=peer_dials) as (_, peer):
        peer.connection.send_datagram(encode_datagram(PaddingDatagram(2)))
        peer.connection.send_datagram(encode_datagram(ObjectDatagram(5, Location(1, 2), 128, payload=b"hi")))
        stream = await peer.send(bytes.fromhex("f0132b3e2800000000"))
        await peer.send(bytes.fromhex("8050") + b"\x05\x0c\x80\x00\x01A", fin=True)
        await check_lives(peer)
        assert stream.stopped is not None


# 2: the length of a message.

MESSAGES: list[Message] = [
    Subscribe(0, NAME),
    Publish(0, NAME, 1),
    Fetch(0, NAME),
    TrackStatus(0, NAME),
    PublishNamespace(0, NAMESPACE),
    SubscribeNamespace(0, NAMESPACE),
    SubscribeTracks(0, NAMESPACE),
]
AFTER_SUBSCRIBE: list[Message] = [
    RequestUpdate(2),
    Goaway(),
]
assert {type(message) for message in MESSAGES} == set(REQUESTS)


def resized(message: Message, change: int) -> bytes:
    """The message with a byte more or less in its body, and the length that says so."""
    data = encode(message)
    head = len(encode_vi64(message.TYPE))
    body = data[head + 2 :]
    body = body + b"\x00" if change > 0 else body[:-1]
    return data[:head] + len(body).to_bytes(2) + body


@pytest.mark.parametrize("change", [1, -1])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
async def test_2_length_of_requests(message: Message, change: int) -> None:
    async with hostile() as (session, peer):
        await peer.ask(resized(message, change))
        await check_closed(session, peer, V)


@pytest.mark.parametrize("change", [1, -1])
@pytest.mark.parametrize("message", AFTER_SUBSCRIBE, ids=lambda message: type(message).__name__)
async def test_2_length_of_what_follows_a_request(message: Message, change: int) -> None:
    async with hostile() as (session, peer):
        await peer.ask(encode(Subscribe(0, NAME)) + resized(message, change))
        await check_closed(session, peer, V)


@pytest.mark.parametrize("change", [1, -1])
@pytest.mark.parametrize(
    "message", [SubscribeOk(1), RequestError(0x10, 0, "no")], ids=lambda message: type(message).__name__
)
async def test_2_length_of_replies(message: Message, change: int) -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe(NAME))
        talk, _ = await peer.request()
        await talk.say(resized(message, change))
        with pytest.raises(ProtocolError):
            await asking
        await check_closed(session, peer, V)


@both_roles
async def test_2_length_of_a_goaway_on_the_control_stream(peer_dials: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        assert peer.control is not None
        await peer.control.write(resized(Goaway(), 1))
        await check_closed(session, peer, V)


# 3: what opens a request stream.


@both_roles
@pytest.mark.parametrize(
    "message",
    [
        SubscribeOk(1),
        RequestUpdate(0),
        RequestOk(),
        RequestError(0x10),
        PublishDone(2, 0),
        PublishStateNotify(),
        FetchOk(False, Location(0, 0)),
        Namespace((b"a",)),
        NamespaceDone((b"a",)),
        PublishSkipped((b"a",), b"t"),
        Goaway(),
        Setup(),
    ],
    ids=lambda message: type(message).__name__,
)
async def test_3_no_request(peer_dials: bool, message: Message) -> None:
    """S12 too."""
    async with hostile(peer_dials=peer_dials) as (session, peer):
        await peer.ask(encode(message))
        await check_closed(session, peer, V)


# 4: the control stream.


@both_roles
@pytest.mark.parametrize("how", ["fin", "reset", "second setup", "request", "second stream", "reply"])
async def test_4_control_stream(peer_dials: bool, how: str) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        assert peer.control is not None
        match how:
            case "fin":
                await peer.control.write(b"", fin=True)
            case "reset":
                peer.control.reset(1)
            case "second setup":
                await peer.control.write(encode(Setup()))
            case "request":
                await peer.control.write(encode(Subscribe(peer.id(), NAME)))
            case "reply":
                await peer.control.write(encode(RequestOk()))
            case "second stream":
                await peer.send(encode(Setup()))
        await check_closed(session, peer, V)


@both_roles
async def test_4_reading_of_our_control_stream_stopped(peer_dials: bool) -> None:
    """With it we can't say GOAWAY any more; the draft names it no violation."""
    async with hostile(peer_dials=peer_dials) as (session, peer):
        control = await peer.connection.accept()
        control.stop(1)
        await check_lives(peer)
        assert not session.closed


@both_roles
async def test_4_fin_inside_setup(peer_dials: bool) -> None:
    async with unset(peer_dials=peer_dials) as (starting, session, peer):
        await peer.send(encode(Setup())[:-1], fin=True)
        with pytest.raises(SessionClosed):
            await starting
        await check_closed(session, peer, V)


# 5 to 8: parameters.


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        pytest.param("7e00", 1, id="X12 unknown"),
        pytest.param("10010001", 2, id="X13 repeated"),
        pytest.param("090101", 1, id="X14 LARGEST_OBJECT"),
        pytest.param("0801", 1, id="X15 EXPIRES"),
        pytest.param("0a05", 1, id="FILL_TIMEOUT outside of a fill"),
        pytest.param("290400780101", 1, id="TRACK_PROPERTY_FILTER"),
        pytest.param("3501ff" + "ff" * 8 + "00", 2, id="X22 overflow"),
        pytest.param("21052105", 2, id="unknown after LOCATION_FILTER"),
        pytest.param("1001", 2, id="fewer than counted"),
        pytest.param("", 1, id="none of one"),
        pytest.param("2200", 1, id="X08 GROUP_ORDER 0"),
        pytest.param("2203", 1, id="X09 GROUP_ORDER 3"),
        pytest.param("1002", 1, id="X10 FORWARD 2"),
        pytest.param("3502", 1, id="X11 INCLUDE_PROPERTIES 2"),
        pytest.param("2106", 1, id="X01 filter type 6"),
        pytest.param("2103" + "ff" * 9 + "0001", 1, id="X02 end group overflow"),
        pytest.param("2104010000", 1, id="X03 filter cut"),
        pytest.param("21", 1, id="filter without type"),
        pytest.param("2303011001", 1, id="X05 FORWARD in a fill"),
        pytest.param("230701290400780101", 1, id="X06 TRACK_PROPERTY_FILTER in a fill"),
        pytest.param("2303012300", 1, id="fill in a fill"),
        pytest.param("230401200199", 1, id="X33 spare byte in a fill"),
        pytest.param("2105230501210200", 2, id="fill cut"),
    ],
)
async def test_5_6_7_8_parameters_of_subscribe(parameters: str, count: int) -> None:
    async with hostile() as (session, peer):
        await peer.ask(subscribe(peer.id(), parameters, count=count))
        await check_closed(session, peer, V)


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param("21020000", id="X04 Absolute 0/0"),
        pytest.param("2105", id="Next Object"),
        pytest.param("2100", id="None"),
        pytest.param("210101", id="Relative"),
        pytest.param("2300", id="C35 empty fill"),
        pytest.param("230100", id="C34 empty fill, counted"),
        pytest.param("230421020000", id="C32 fill without count"),
        pytest.param("230121020000", id="C33 fill without length"),
    ],
)
async def test_7_8_legal_forms(parameters: str) -> None:
    async with hostile() as (_, peer):
        talk = await peer.ask(subscribe(peer.id(), parameters), kind=Subscribe)
        assert isinstance(await talk.next(), SubscribeOk)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(0x16, names() + b"\x01" + bytes.fromhex("230100"), id="X07 fill in a FETCH"),
        pytest.param(0x16, names() + b"\x01" + bytes.fromhex("1001"), id="FORWARD in a FETCH"),
        pytest.param(0x0D, names() + b"\x01" + bytes.fromhex("2105"), id="filter in a TRACK_STATUS"),
        pytest.param(0x06, b"\x01\x01a" + b"\x01" + bytes.fromhex("0801"), id="EXPIRES in PUBLISH_NAMESPACE"),
        pytest.param(
            0x50, b"\x01\x01a" + b"\x01" + bytes.fromhex("34010161"), id="prefix in SUBSCRIBE_NAMESPACE"
        ),
        pytest.param(0x1D, names() + b"\x01\x01" + bytes.fromhex("230100"), id="fill in a PUBLISH"),
    ],
)
async def test_5_parameters_where_they_do_not_belong(kind: int, body: bytes) -> None:
    async with hostile() as (session, peer):
        await peer.ask(framed(kind, encode_vi64(peer.id()) + body))
        await check_closed(session, peer, V)


@pytest.mark.parametrize("parameter", ["2201", "3501", "0401", "340161"])
async def test_5_parameters_of_an_update(parameter: str) -> None:
    async with hostile() as (session, peer):
        body = encode_vi64(2) + b"\x01" + bytes.fromhex(parameter)
        await peer.ask(encode(Subscribe(peer.id(), NAME)) + framed(0x02, body))
        await check_closed(session, peer, V)


@pytest.mark.parametrize(
    ("request_made", "reply"),
    [
        pytest.param("publish_namespace", "070003011001", id="X16 FORWARD in REQUEST_OK"),
        pytest.param("publish_namespace", "07000401090101", id="LARGEST_OBJECT in REQUEST_OK"),
        pytest.param("fetch", "180006000101010801", id="X17 parameter in FETCH_OK"),
        pytest.param("fetch", "18000402000000", id="End Of Track 2"),
        pytest.param("subscribe", "04000401011001", id="FORWARD in SUBSCRIBE_OK"),
        pytest.param("subscribe", "04000402002200", id="30: X30 group order 0"),
        pytest.param("subscribe", "04000402002203", id="30: group order 3"),
        pytest.param("subscribe", "04000402003002", id="30: X31 DYNAMIC_GROUPS 2"),
        pytest.param("publish_namespace", "070003003001", id="19 properties"),
        pytest.param("subscribe_namespace", "070003003001", id="19 properties of a watch"),
        pytest.param("subscribe_namespace", "080003010161", id="20 NAMESPACE first"),
        pytest.param("subscribe_namespace", "0e0003010161", id="20 NAMESPACE_DONE first"),
        pytest.param("subscribe_namespace", "0400020200", id="20 SUBSCRIBE_OK first"),
        pytest.param("fetch", "18000400000200", id="21 end before start"),
        pytest.param("fetch", "0400020200", id="SUBSCRIBE_OK to a FETCH"),
        pytest.param("track_status", "0700010007000100", id="22 two replies"),
    ],
)
async def test_replies_that_close_the_session(request_made: str, reply: str) -> None:
    """5, 19, 20, 21, 22, 30: what a responder must not say."""
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(make_request(session, request_made))
        talk, _ = await peer.request()
        await talk.say(bytes.fromhex(reply))
        await check_closed(session, peer, V)
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.exception() is None or isinstance(asking.exception(), ProtocolError)


@both_roles
async def test_21_the_end_of_a_fetch_may_be_its_start(peer_dials: bool) -> None:
    async with hostile(peer_dials=peer_dials) as (session, peer):
        asking = asyncio.ensure_future(make_request(session, "fetch"))
        talk, _ = await peer.request()
        await talk.say(FetchOk(True, Location(0, 5)))
        fetch = await asking
        assert isinstance(fetch, FetchStream)
        await fetch.close()
        await check_lives(peer)


async def test_20_namespace_done_before_its_namespace() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace(NAMESPACE))
        talk, _ = await peer.request()
        await talk.say(RequestOk(), Namespace((b"x",)), NamespaceDone((b"x",)), NamespaceDone((b"x",)))
        watch = await asking
        await check_closed(session, peer, V)
        with pytest.raises(SessionClosed):
            async for _event in watch:
                pass


@pytest.mark.parametrize("reply", [SubscribeOk(1), RequestError(0x10), RequestOk()])
async def test_22_second_reply_to_a_subscribe(reply: Message) -> None:
    async with subscribed() as (session, peer, _subscription, talk):
        await talk.say(reply)
        await check_closed(session, peer, V)
