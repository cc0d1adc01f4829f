"""What an endpoint must check (spec/moqt.md 20), the limits of 18, and the vectors of 26.6 and 26.7, against
a Session that talks to a hostile peer.

One row: the rule, what the peer does, where its bytes go, the bytes, and how the session must react. Every
row runs against a session that is the client and one that is the server, unless the rule is about one of
them. `test_checks` and its kin look at the same rules from nearer by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest

from moqt.errors import (
    DeadlineExceeded,
    DoneCode,
    MalformedTrack,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionCode,
    StreamReset,
)
from moqt.filters import GroupOrder, Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import Stream
from moqt.session import Session
from moqt.subscribing import ReceivedObject
from moqt.wire import (
    Fetch,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    encode,
)
from tests.moqt import hostile
from tests.moqt.hostile import (
    ALIAS,
    MAXIMUM,
    NAMESPACE,
    OFFERED,
    WANTED,
    Bytes,
    Hostile,
    Ids,
    Scene,
    assert_refused,
    frame,
    full_name,
    in_time,
    meeting,
    messages,
    namespace,
    prefixed,
    read_all,
    vi,
)

pytestmark = pytest.mark.virtual

# Control messages.

UNKNOWN_MESSAGE = 0x99
SETUP, GOAWAY = 0x2F00, 0x10
SUBSCRIBE, SUBSCRIBE_OK, REQUEST_UPDATE = 0x03, 0x04, 0x02
REQUEST_OK, REQUEST_ERROR = 0x07, 0x05
PUBLISH, PUBLISH_DONE, PUBLISH_STATE_NOTIFY = 0x1D, 0x0B, 0x22
FETCH, FETCH_OK, TRACK_STATUS = 0x16, 0x18, 0x0D
PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS = 0x06, 0x50, 0x51
NAMESPACE_, NAMESPACE_DONE, PUBLISH_SKIPPED = 0x08, 0x0E, 0x0F

SUBSCRIBED = frame(SUBSCRIBE_OK, vi(ALIAS, 0))
OK = frame(REQUEST_OK, vi(0))
FETCHED = frame(FETCH_OK, vi(0), vi(9, 0), vi(0))
DONE = frame(PUBLISH_DONE, vi(DoneCode.TRACK_ENDED, 0, 0))
ERROR = frame(REQUEST_ERROR, vi(RequestCode.DOES_NOT_EXIST, 0, 0))


def about(kind: int, parameters: str = "00", track: FullTrackName = OFFERED, *, number: int = 0) -> Bytes:
    """A request about a Track; `parameters` are their count and their bytes, in hex; `number` counts the
    requests of the peer.
    """
    return lambda ids: frame(kind, vi(ids.mine + 2 * number), full_name(track), bytes.fromhex(parameters))


def under(kind: int, prefix: bytes, parameters: str = "00", *, number: int = 0) -> Bytes:
    """A request about a namespace, whose encoding is given."""
    return lambda ids: frame(kind, vi(ids.mine + 2 * number), prefix, bytes.fromhex(parameters))


def publish(properties: bytes = b"") -> Bytes:
    return lambda ids: frame(PUBLISH, vi(ids.mine), full_name(WANTED), vi(ALIAS, 0), properties)


def update(parameters: str = "00", *, numbers: Sequence[int] = (1,)) -> Bytes:
    """REQUEST_UPDATEs, all in one piece; `numbers` as for `about`."""
    return lambda ids: b"".join(
        frame(REQUEST_UPDATE, vi(ids.mine + 2 * number), bytes.fromhex(parameters)) for number in numbers
    )


def goaway(uri: bytes = b"") -> bytes:
    return frame(GOAWAY, prefixed(uri), vi(0))


def redirect(uri: bytes, name: FullTrackName) -> bytes:
    return frame(REQUEST_ERROR, vi(RequestCode.REDIRECT, 0, 0), prefixed(uri), full_name(name))


def option(kind: int, value: bytes) -> bytes:
    """The first Setup Option, of odd type."""
    return vi(kind) + prefixed(value)


def token(kind: int, *fields: int, value: bytes = b"") -> str:
    """One AUTHORIZATION_TOKEN: count, type, and the value, in hex."""
    return "0103" + prefixed(vi(kind, *fields) + value).hex()


# Data streams.


def subgroup(flags: int, group: int, *rest: bytes) -> bytes:
    return vi(flags, ALIAS, group) + b"".join(rest)


def item(delta: int, payload: bytes = b"x") -> bytes:
    """An Object of a subgroup stream that has no Properties."""
    return vi(delta) + prefixed(payload)


def status(delta: int, value: int) -> bytes:
    return vi(delta, 0, value)


def fetched(*records: bytes) -> Bytes:
    """The stream of the session's first request, a FETCH."""
    return lambda ids: vi(0x05, ids.session) + b"".join(records)


def record(flags: int, *rest: bytes) -> bytes:
    return vi(flags) + b"".join(rest)


FIRST = record(0x1C, vi(1, 0), b"\x80", prefixed(b"x"))
"""The Object at {1, 0}, as the first record of a fetch stream."""
END_OF_RANGE = record(0x10C, vi(2, 0))

# Where the bytes go. What is returned is where an answer to them would come.

Application: TypeAlias = Callable[[Session], Awaitable[object]]
Place: TypeAlias = Callable[[Hostile, bytes, bool], Awaitable[Stream | None]]


async def as_request(peer: Hostile, data: bytes, fin: bool) -> Stream:
    return await peer.request(data, fin=fin)


async def on_control(peer: Hostile, data: bytes, fin: bool) -> None:
    await peer.say(data, fin=fin)


async def as_setup(peer: Hostile, data: bytes, fin: bool) -> None:
    await peer.open_control(data, fin=fin)


async def as_stream(peer: Hostile, data: bytes, fin: bool) -> None:
    await peer.stream(data, fin=fin)


async def as_datagram(peer: Hostile, data: bytes, fin: bool) -> None:
    peer.connection.send_datagram(data)


async def reset_control(peer: Hostile, data: bytes, fin: bool) -> None:
    assert peer.control is not None
    peer.control.reset(ResetCode.CANCELLED)


def as_reply(application: Application, *before: bytes) -> Place:
    """On the request that the application makes, after the messages `before`, each in a piece of its own."""

    async def place(peer: Hostile, data: bytes, fin: bool) -> Stream:
        stream = await peer.ask(application)
        for message in before:
            await stream.write(message)
            await in_time(peer.connection.ping())
        await stream.write(data, fin=fin)
        return stream

    return place


def after(request: Bytes, answer: type[Subscribe | SubscribeNamespace | Fetch | TrackStatus]) -> Place:
    """On a request of the peer, once the session has accepted it."""

    async def place(peer: Hostile, data: bytes, fin: bool) -> Stream:
        stream = await peer.request(peer.spell(request))
        await messages(stream, answer, 1)
        await stream.write(data, fin=fin)
        return stream

    return place


def as_data(application: Application, reply: bytes) -> Place:
    """On a data stream, when the peer has accepted what the application asks for."""

    async def place(peer: Hostile, data: bytes, fin: bool) -> Stream:
        request = await peer.ask(application)
        await request.write(reply)
        await peer.stream(data, fin=fin)
        return request

    return place


async def fetch_backwards(session: Session) -> object:
    groups = LocationFilter.groups(1, 9)
    async with await session.fetch(WANTED, filter=groups, order=GroupOrder.DESCENDING) as objects:
        return [known async for known in objects]


async def subscribe_twice(session: Session) -> None:
    """Two Tracks, one after the other."""
    other = FullTrackName(NAMESPACE, b"another")
    async with await session.subscribe(WANTED), await session.subscribe(other):
        await session.wait_closed()


def both_alike(reply: bytes) -> Place:
    """Accepts both requests of `subscribe_twice` in the same way; the data is the second reply."""

    async def place(peer: Hostile, data: bytes, fin: bool) -> None:
        await (await peer.ask(subscribe_twice)).write(reply)
        await (await peer.accept()).write(data)

    return place


after_subscribe = after(about(SUBSCRIBE), Subscribe)
after_fetch = after(about(FETCH), Fetch)
after_status = after(about(TRACK_STATUS), TrackStatus)
after_namespaces = after(under(SUBSCRIBE_NAMESPACE, namespace(b"x")), SubscribeNamespace)

reply_to_subscribe = as_reply(hostile.subscribe)
reply_to_fetch = as_reply(hostile.fetch)
reply_to_status = as_reply(hostile.track_status)
reply_to_watch = as_reply(hostile.subscribe_namespace)
reply_to_announcement = as_reply(hostile.publish_namespace)

in_subscription = as_reply(hostile.subscribe, SUBSCRIBED)
in_fetch = as_reply(hostile.fetch, FETCHED)
in_watch = as_reply(hostile.subscribe_namespace, OK)
in_update = as_reply(hostile.update, SUBSCRIBED)

data_of_subscription = as_data(hostile.subscribe, SUBSCRIBED)
data_of_fetch = as_data(hostile.fetch, FETCHED)
data_backwards = as_data(fetch_backwards, FETCHED)


# How the session reacts.


@dataclass(frozen=True, slots=True)
class Close:
    """It closes with this code."""

    code: SessionCode

    async def check(self, peer: Hostile, stream: Stream | None) -> None:
        assert await peer.close_code() == self.code


@dataclass(frozen=True, slots=True)
class Refuse:
    """It answers REQUEST_ERROR, and goes on."""

    code: RequestCode

    async def check(self, peer: Hostile, stream: Stream | None) -> None:
        assert stream is not None
        await assert_refused(stream, self.code)
        await peer.assert_alive()


@dataclass(frozen=True, slots=True)
class Live:
    """It goes on."""

    async def check(self, peer: Hostile, stream: Stream | None) -> None:
        await peer.assert_alive()


@dataclass(frozen=True, slots=True)
class Cancel:
    """It cancels what it had asked for with MALFORMED_TRACK, tells the application, and goes on."""

    async def check(self, peer: Hostile, stream: Stream | None) -> None:
        assert stream is not None
        with pytest.raises(MalformedTrack):
            await in_time(peer.asked[-1])
        await peer.assert_alive()
        assert stream.stopped == ResetCode.MALFORMED_TRACK
        with pytest.raises(StreamReset) as caught:
            await read_all(stream)
        assert caught.value.code == ResetCode.MALFORMED_TRACK


PV = Close(SessionCode.PROTOCOL_VIOLATION)
CANCELS = Cancel()
LIVES = Live()
INVALID_FILTER = Refuse(RequestCode.INVALID_FILTER)
DOES_NOT_EXIST = Refuse(RequestCode.DOES_NOT_EXIST)

CLIENT, SERVER = True, False
BOTH = (CLIENT, SERVER)


@dataclass(frozen=True, slots=True)
class Row:
    """`roles` are those of the session."""

    rule: str
    what: str
    place: Place
    data: Bytes
    reaction: Close | Refuse | Cancel | Live
    fin: bool = False
    roles: tuple[bool, ...] = BOTH
    limits: Limits = field(default_factory=Limits)


def _unknown() -> Iterator[Row]:
    yield Row("1", "unknown message opens a request", as_request, frame(UNKNOWN_MESSAGE), PV)
    for kind in (0x01, 0x20, 0x21, 0x40, 0x41, 0x1E):
        yield Row("1", f"reserved message {kind:#x}", as_request, frame(kind), PV)
    yield Row("1", "unknown message on the control stream", on_control, frame(UNKNOWN_MESSAGE), PV)
    yield Row("1", "unknown message instead of a reply", reply_to_subscribe, frame(UNKNOWN_MESSAGE), PV)
    yield Row("1", "unknown message after a request", after_subscribe, frame(UNKNOWN_MESSAGE), PV)
    yield Row("1 S14", "unknown uni stream type", as_stream, vi(0x1234), PV)
    yield Row("1", "uni stream with the type of another message", as_stream, vi(SUBSCRIBE), PV)
    yield Row("1", "uni stream ends inside its type", as_stream, b"\xf0\x13", PV, fin=True)
    yield Row("1 S15", "datagram type 0x10", as_datagram, vi(0x10, ALIAS, 0, 0) + b"x", PV)
    yield Row("1", "unknown datagram type", as_datagram, vi(0x1234) + b"x", PV)
    yield Row("1", "empty datagram", as_datagram, b"", PV)


def _lengths() -> Iterator[Row]:
    rest = full_name(OFFERED) + vi(0)
    yield Row(
        "2 S14",
        "a spare byte in SUBSCRIBE",
        as_request,
        lambda ids: frame(SUBSCRIBE, vi(ids.mine), rest, b"\0"),
        PV,
    )
    yield Row("2", "SUBSCRIBE cut off", as_request, lambda ids: frame(SUBSCRIBE, vi(ids.mine), rest[:-1]), PV)
    yield Row("2", "empty SUBSCRIBE", as_request, frame(SUBSCRIBE), PV)
    yield Row("2", "a spare byte in GOAWAY", on_control, frame(GOAWAY, vi(0, 0), b"\0"), PV)
    yield Row("2", "a spare byte in REQUEST_ERROR", reply_to_subscribe, frame(REQUEST_ERROR, bytes(4)), PV)
    yield Row("2", "a spare byte in PUBLISH_DONE", in_subscription, frame(PUBLISH_DONE, bytes(4)), PV)
    yield Row("2", "a spare byte in REQUEST_UPDATE", after_subscribe, update("0000"), PV)
    yield Row("2", "FETCH_OK cut off", reply_to_fetch, frame(FETCH_OK, vi(0, 9)), PV)
    yield Row("2", "SETUP cut off", as_setup, frame(SETUP, vi(0x04)), PV)
    # moqt 25 #14
    yield Row("2", "FIN inside a request", as_request, frame(SUBSCRIBE, vi(0), length=9), PV, fin=True)
    yield Row("2", "FIN inside a reply", reply_to_subscribe, frame(SUBSCRIBE_OK, length=9), PV, fin=True)


def _openers() -> Iterator[Row]:
    for name, message in {
        "SUBSCRIBE_OK": SUBSCRIBED,
        "REQUEST_UPDATE": frame(REQUEST_UPDATE, vi(0, 0)),
        "REQUEST_OK": OK,
        "REQUEST_ERROR": ERROR,
        "PUBLISH_DONE": DONE,
        "PUBLISH_STATE_NOTIFY": frame(PUBLISH_STATE_NOTIFY, vi(0)),
        "FETCH_OK": FETCHED,
        "NAMESPACE": frame(NAMESPACE_, namespace()),
        "NAMESPACE_DONE": frame(NAMESPACE_DONE, namespace()),
        "PUBLISH_SKIPPED": frame(PUBLISH_SKIPPED, namespace(), prefixed(b"")),
        "GOAWAY": goaway(),
        "SETUP": frame(SETUP),
    }.items():
        yield Row("3 S12", f"{name} opens a request stream", as_request, message, PV)
    yield Row("3", "a request stream without a request", as_request, b"", PV, fin=True)
    yield Row(
        "3",
        "a second request on a stream",
        as_request,
        lambda ids: b"".join(
            frame(SUBSCRIBE, vi(number), full_name(OFFERED), vi(0)) for number in (ids.mine, ids.mine + 2)
        ),
        PV,
    )


def _control() -> Iterator[Row]:
    yield Row("4 S14", "FIN of the control stream", on_control, b"", PV, fin=True)
    yield Row("4", "reset of the control stream", reset_control, b"", PV)
    yield Row("4 S14", "second SETUP", on_control, frame(SETUP), PV)
    yield Row("4", "second control stream", as_stream, frame(SETUP), PV)
    yield Row("4", "SUBSCRIBE on the control stream", on_control, about(SUBSCRIBE), PV)
    yield Row("4", "REQUEST_UPDATE on the control stream", on_control, update(), PV)
    yield Row("4", "SUBSCRIBE behind SETUP", as_setup, frame(SETUP) + frame(SUBSCRIBE), PV)
    yield Row("4", "FIN behind SETUP", as_setup, frame(SETUP), PV, fin=True)
    yield Row("4", "FIN inside SETUP", as_setup, vi(SETUP) + b"\0", PV, fin=True)


def _parameters() -> Iterator[Row]:
    for kind, name in ((SUBSCRIBE, "SUBSCRIBE"), (FETCH, "FETCH"), (TRACK_STATUS, "TRACK_STATUS")):
        yield Row("5", f"unknown parameter in {name}", as_request, about(kind, "017e00"), PV)
        yield Row("5", f"LARGEST_OBJECT in {name}", as_request, about(kind, "01090101"), PV)
        yield Row("5", f"EXPIRES in {name}", as_request, about(kind, "010801"), PV)
        yield Row("5", f"type overflow in {name}", as_request, about(kind, "023501ffffffffffffffffff00"), PV)
        yield Row("5", f"INCLUDE_PROPERTIES twice in {name}", as_request, about(kind, "0235010001"), PV)
        yield Row("5", f"fewer parameters than counted in {name}", as_request, about(kind, "023501"), PV)
    yield Row("5", "FORWARD twice", as_request, about(SUBSCRIBE, "0210010001"), PV)
    yield Row("5", "FORWARD in FETCH", as_request, about(FETCH, "011001"), PV)
    yield Row("5", "GROUP_ORDER in TRACK_STATUS", as_request, about(TRACK_STATUS, "012201"), PV)
    yield Row("5", "LARGEST_OBJECT in PUBLISH_NAMESPACE", as_request, under(6, namespace(), "01090101"), PV)
    yield Row("5", "FORWARD in SUBSCRIBE_NAMESPACE", as_request, under(0x50, namespace(), "011001"), PV)
    yield Row("5", "unknown in SUBSCRIBE_TRACKS", as_request, under(0x51, namespace(), "017e00"), PV)
    yield Row("5", "unknown in SUBSCRIBE_OK", reply_to_subscribe, frame(4, vi(ALIAS, 1, 0x7E, 0)), PV)
    yield Row("5", "FORWARD in SUBSCRIBE_OK", reply_to_subscribe, frame(4, vi(ALIAS, 1, 0x10, 1)), PV)
    yield Row("5", "FORWARD in REQUEST_OK", reply_to_watch, frame(REQUEST_OK, vi(1, 0x10, 1)), PV)
    yield Row("5", "LARGEST_OBJECT in REQUEST_OK", reply_to_watch, frame(7, vi(1, 9, 1, 1)), PV)
    yield Row("5", "EXPIRES in TRACK_STATUS_OK", reply_to_status, frame(7, vi(1, 8, 1)), PV)
    yield Row("5", "EXPIRES in FETCH_OK", reply_to_fetch, frame(FETCH_OK, vi(0, 9, 0, 1, 8, 1)), PV)
    yield Row("5", "EXPIRES in PUBLISH_STATE_NOTIFY", in_subscription, frame(0x22, vi(1, 8, 1)), PV)
    yield Row("5", "FORWARD in REQUEST_UPDATE_OK", in_update, frame(7, vi(1, 0x10, 1)), PV)
    yield Row("5", "GROUP_ORDER in REQUEST_UPDATE", after_subscribe, update("012201"), PV)
    yield Row("5", "FORWARD in the update of a FETCH", after_fetch, update("011001"), PV)
    yield Row("5", "FORWARD in the update of SUBSCRIBE_NAMESPACE", after_namespaces, update("011001"), PV)
    yield Row("5", "the same token twice", as_request, about(SUBSCRIBE, "0203030300780003030078"), PV)
    yield Row("6", "INCLUDE_PROPERTIES 2 in FETCH", as_request, about(FETCH, "013502"), PV)
    yield Row("6", "GROUP_ORDER 0 in FETCH", as_request, about(FETCH, "012200"), PV)
    for name, value in {
        "FORWARD 2": "011002",
        "GROUP_ORDER 0": "012200",
        "GROUP_ORDER 3": "012203",
        "INCLUDE_PROPERTIES 2": "013502",
    }.items():
        yield Row("6", f"{name} in SUBSCRIBE", as_request, about(SUBSCRIBE, value), PV)
    yield Row("6", "FORWARD 2 in REQUEST_UPDATE", after_subscribe, update("011002"), PV)
    yield Row("6", "FORWARD 2 in PUBLISH_STATE_NOTIFY", in_subscription, frame(0x22, vi(1, 0x10, 2)), PV)
    yield Row("6", "GROUP_ORDER 3 in FILL_PARAMETERS", as_request, about(SUBSCRIBE, "012303012203"), PV)
    for name, value in {
        "type 6": "06",
        "EndGroup overflow of type 3": "03" + vi(MAXIMUM, 0, 1).hex(),
        "EndGroup overflow of type 4": "04" + vi(MAXIMUM, 0, 1, 0).hex(),
        "type 1 cut off": "01",
        "type 2 cut off": "0200",
        "type 4 cut off": "04010000",
    }.items():
        for kind, request in ((SUBSCRIBE, "SUBSCRIBE"), (FETCH, "FETCH")):
            yield Row(
                "7", f"LOCATION_FILTER of {name} in {request}", as_request, about(kind, "0121" + value), PV
            )
        inner = prefixed(bytes.fromhex("0121" + value)).hex()
        yield Row(
            "7", f"LOCATION_FILTER of {name} in a fill", as_request, about(SUBSCRIBE, "0123" + inner), PV
        )
        yield Row("7", f"LOCATION_FILTER of {name} in an update", after_subscribe, update("0121" + value), PV)
    for name, value in {
        "FORWARD": "1001",
        "TRACK_PROPERTY_FILTER": "290400780101",
        "AUTHORIZATION_TOKEN": "03020300",
        "FILL_PARAMETERS": "230100",
        "an unknown one": "7e00",
    }.items():
        inner = prefixed(b"\1" + bytes.fromhex(value)).hex()
        yield Row("8", f"{name} inside FILL_PARAMETERS", as_request, about(SUBSCRIBE, "0123" + inner), PV)
        yield Row(
            "8", f"{name} inside FILL_PARAMETERS of an update", after_subscribe, update("0123" + inner), PV
        )
    yield Row("8", "FILL_PARAMETERS in FETCH", as_request, about(FETCH, "01230100"), PV)


def _pairs() -> Iterator[Row]:
    overflow = vi(0x04, 0, MAXIMUM, 0)
    long = vi(0x79, 65536)
    for name, value in (("type overflow", overflow), ("value of 65536 bytes", long)):
        yield Row("9", f"{name} in SETUP", as_setup, frame(SETUP, value), PV)
        yield Row("9", f"{name} in SUBSCRIBE_OK", reply_to_subscribe, frame(4, vi(ALIAS, 0), value), PV)
        yield Row("9", f"{name} in FETCH_OK", reply_to_fetch, frame(0x18, vi(0, 9, 0, 0), value), PV)
        yield Row("9", f"{name} in TRACK_STATUS_OK", reply_to_status, frame(7, vi(0), value), PV)
        yield Row("9", f"{name} in PUBLISH", as_request, publish(value), PV)
        yield Row(
            "9",
            f"{name} in Object Properties",
            data_of_subscription,
            subgroup(0x31, 0, vi(0), prefixed(value), prefixed(b"x")),
            PV,
        )
        yield Row(
            "9",
            f"{name} in Object Properties of a fetch",
            data_of_fetch,
            fetched(record(0x3C, vi(1, 0), b"\x80", prefixed(value), prefixed(b"x"))),
            PV,
        )
    yield Row("9", "value cut off in SETUP", as_setup, frame(SETUP, vi(0x07, 4), b"abc"), PV)
    yield Row("9", "known option twice", as_setup, frame(SETUP, vi(0x04, 1, 0, 1)), PV)
    malformed = Close(SessionCode.KEY_VALUE_FORMATTING_ERROR)
    priority = vi(0x0E, 256)
    yield Row(
        "10", "priority 256 in SUBSCRIBE_OK", reply_to_subscribe, frame(4, vi(ALIAS, 0), priority), malformed
    )
    yield Row("10", "implementation is no UTF-8", as_setup, frame(SETUP, option(7, b"\xff")), malformed)
    for name, text in {"Alias Type 9": "0109", "empty token": "00", "alias cut off": "0102"}.items():
        yield Row("10", f"{name} in SUBSCRIBE", as_request, about(SUBSCRIBE, "0103" + text), malformed)
        yield Row("10", f"{name} in an update", after_subscribe, update("0103" + text), malformed)
        yield Row("10", f"{name} in SETUP", as_setup, frame(SETUP, b"\3", bytes.fromhex(text)), malformed)


def _names() -> Iterator[Row]:
    too_long = FullTrackName((b"n" * 4000,), b"k" * 97)
    faults = {
        "33 fields": namespace(*[b"a"] * 33),
        "an empty field": namespace(b"a", b""),
        "4097 bytes": namespace(b"n" * 4097),
    }
    for name, value in faults.items():
        for kind in (PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS):
            yield Row("11", f"namespace of {name} in message {kind:#x}", as_request, under(kind, value), PV)
        for kind in (SUBSCRIBE, FETCH, TRACK_STATUS):
            yield Row(
                "11",
                f"namespace of {name} in message {kind:#x}",
                as_request,
                under(kind, value + prefixed(b"t")),
                PV,
            )
        yield Row("11", f"suffix of {name} in NAMESPACE", in_watch, frame(NAMESPACE_, value), PV)
        yield Row(
            "11",
            f"namespace of {name} in a Redirect",
            reply_to_subscribe,
            frame(REQUEST_ERROR, vi(0x34, 0, 0), prefixed(b""), value, prefixed(b"t")),
            PV,
        )
        yield Row(
            "11",
            f"new prefix of {name}",
            after_namespaces,
            update("0134" + value.hex()),
            PV,
        )
    for kind in (SUBSCRIBE, FETCH, TRACK_STATUS):
        yield Row("11", f"name of 4097 bytes in {kind:#x}", as_request, about(kind, track=too_long), PV)
        longest = FullTrackName((b"n" * 4000,), b"k" * 96)
        yield Row(
            "11", f"name of 4096 bytes in {kind:#x}", as_request, about(kind, track=longest), DOES_NOT_EXIST
        )
        deepest = FullTrackName((b"n",) * 32, b"")
        yield Row("11", f"32 fields in {kind:#x}", as_request, about(kind, track=deepest), DOES_NOT_EXIST)
    yield Row("11", "prefix and suffix have 33 fields", in_watch, frame(8, namespace(*[b"a"] * 31)), PV)
    yield Row("11", "prefix and suffix have 32 fields", in_watch, frame(8, namespace(*[b"a"] * 30)), LIVES)
    yield Row("11", "prefix and suffix have 4097 bytes", in_watch, frame(8, namespace(b"a" * 4095)), PV)
    yield Row("11", "prefix and suffix have 4096 bytes", in_watch, frame(8, namespace(b"a" * 4094)), LIVES)


def _texts() -> Iterator[Row]:
    for size, reaction in ((1025, PV), (1024, LIVES)):
        reason = prefixed(b"r" * size)
        yield Row(
            "12",
            f"reason of {size} bytes in REQUEST_ERROR",
            reply_to_subscribe,
            frame(REQUEST_ERROR, vi(0x10, 0), reason),
            reaction,
            fin=True,
        )
        yield Row(
            "12",
            f"reason of {size} bytes in PUBLISH_DONE",
            in_subscription,
            frame(PUBLISH_DONE, vi(DoneCode.TRACK_ENDED, 0), reason),
            reaction,
            fin=True,
        )
    for place, where in ((on_control, "the control stream"), (reply_to_subscribe, "a request")):
        for size, reaction in ((8193, PV), (8192, LIVES)):
            yield Row(
                "12", f"URI of {size} bytes on {where}", place, goaway(b"u" * size), reaction, roles=(CLIENT,)
            )
    yield Row("12", "URI of 8193 bytes at a server", on_control, goaway(b"u" * 8193), PV, roles=(SERVER,))


def _goaway() -> Iterator[Row]:
    uri = b"moqt://elsewhere"
    for role, reaction in ((SERVER, PV), (CLIENT, LIVES)):
        roles = (role,)
        yield Row("13 S14", "URI in GOAWAY", on_control, goaway(uri), reaction, roles=roles)
        yield Row(
            "13", "URI in GOAWAY on a request of ours", reply_to_subscribe, goaway(uri), reaction, roles=roles
        )
        yield Row(
            "13", "URI in GOAWAY on a request of theirs", after_subscribe, goaway(uri), reaction, roles=roles
        )
        yield Row("13", "URI in a Redirect", reply_to_subscribe, redirect(uri, WANTED), reaction, True, roles)
    yield Row("13", "Redirect inside the session", reply_to_subscribe, redirect(b"", WANTED), LIVES, True)
    yield Row("13 S14", "second GOAWAY", on_control, goaway() + goaway(), PV)
    yield Row("13", "one GOAWAY without URI", on_control, goaway(), LIVES)
    yield Row("13", "second GOAWAY on a request of ours", reply_to_subscribe, goaway() + goaway(), PV)
    yield Row("13", "second GOAWAY on a subscription of ours", in_subscription, goaway() + goaway(), PV)
    yield Row("13", "second GOAWAY on a request of theirs", after_subscribe, goaway() + goaway(), PV)
    yield Row("13", "one GOAWAY on each request", after_subscribe, goaway(), LIVES)
    scoped = FullTrackName((b"x",), b"")
    named = FullTrackName((b"x",), b"t")
    for place, name in (
        (reply_to_watch, "SUBSCRIBE_NAMESPACE"),
        (reply_to_announcement, "PUBLISH_NAMESPACE"),
    ):
        yield Row("14", f"Redirect of {name} names a Track", place, redirect(b"", named), PV)
        yield Row("14", f"Redirect of {name} names none", place, redirect(b"", scoped), LIVES, True)


def _request_ids() -> Iterator[Row]:
    invalid = Close(SessionCode.INVALID_REQUEST_ID)
    for kind in (SUBSCRIBE, FETCH, TRACK_STATUS):
        yield Row(
            "15 S13",
            f"message {kind:#x} with an ID of our side",
            as_request,
            lambda ids, kind=kind: frame(kind, vi(ids.session), full_name(OFFERED), vi(0)),  # type: ignore[misc]  # kind is bound early
            invalid,
        )
    for kind in (PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS):
        yield Row(
            "15",
            f"message {kind:#x} with an ID of our side",
            as_request,
            lambda ids, kind=kind: frame(kind, vi(ids.session), namespace(b"x"), vi(0)),  # type: ignore[misc]  # kind is bound early
            invalid,
        )
    yield Row(
        "15",
        "PUBLISH with an ID of our side",
        as_request,
        lambda ids: frame(PUBLISH, vi(ids.session), full_name(WANTED), vi(0, 0)),
        invalid,
    )
    yield Row("15 S13", "an ID again", _after_another(about(SUBSCRIBE)), about(SUBSCRIBE), invalid)
    yield Row(
        "15",
        "an ID again after a gap",
        _after_another(about(FETCH, number=50)),
        about(FETCH, number=50),
        invalid,
    )
    yield Row("15", "an update with the ID of its request", after_subscribe, update(numbers=(0,)), invalid)
    yield Row("15", "an update with the ID of another", after_subscribe, update(numbers=(1, 1)), invalid)
    yield Row(
        "15",
        "an update with an ID of our side",
        after_subscribe,
        lambda ids: frame(REQUEST_UPDATE, vi(ids.session + 20, 0)),
        invalid,
    )
    yield Row("15", "a gap", as_request, about(SUBSCRIBE, number=1000), LIVES)
    yield Row(
        "15",
        "IDs in the wrong order",
        _after_another(about(FETCH, number=9)),
        about(SUBSCRIBE, number=4),
        LIVES,
    )
    yield Row("15", "the largest ID", as_request, lambda ids: _with_id(MAXIMUM - 1 + ids.mine), LIVES)


def _with_id(number: int) -> bytes:
    return frame(SUBSCRIBE, vi(number), full_name(OFFERED), vi(0))


def _after_another(request: Bytes) -> Place:
    """A second request stream, after one with `request`."""

    async def place(peer: Hostile, data: bytes, fin: bool) -> Stream:
        await peer.request(peer.spell(request))
        return await peer.request(data, fin=fin)

    return place


def _subscriptions() -> Iterator[Row]:
    duplicate = Close(SessionCode.DUPLICATE_TRACK_ALIAS)
    yield Row("16", "one alias for two Tracks", both_alike(SUBSCRIBED), SUBSCRIBED, duplicate)
    yield Row("16", "two aliases", both_alike(SUBSCRIBED), frame(SUBSCRIBE_OK, vi(ALIAS + 1, 0)), LIVES)
    notify = frame(PUBLISH_STATE_NOTIFY, vi(0))
    for place, name in (
        (in_subscription, "SUBSCRIBE"),
        (in_fetch, "FETCH"),
        (in_watch, "SUBSCRIBE_NAMESPACE"),
        (reply_to_status, "TRACK_STATUS"),
        (as_reply(hostile.publish_namespace, OK), "PUBLISH_NAMESPACE"),
    ):
        yield Row("17", f"REQUEST_UPDATE by the responder of {name}", place, update(), PV)
        if name != "SUBSCRIBE":
            yield Row("17", f"PUBLISH_STATE_NOTIFY on {name}", place, notify, PV)
            yield Row("17", f"PUBLISH_DONE on {name}", place, DONE, PV)
    for place, name in (
        (after_subscribe, "SUBSCRIBE"),
        (after_fetch, "FETCH"),
        (after_namespaces, "SUBSCRIBE_NAMESPACE"),
        (after_status, "TRACK_STATUS"),
    ):
        yield Row("17", f"PUBLISH_STATE_NOTIFY by the requester of {name}", place, notify, PV)
        yield Row("17", f"PUBLISH_DONE by the requester of {name}", place, DONE, PV)
        yield Row("17", f"REQUEST_OK by the requester of {name}", place, OK, PV)
    yield Row("17", "REQUEST_UPDATE on TRACK_STATUS", after_status, update(), PV)
    yield Row("17", "PUBLISH_STATE_NOTIFY before the reply", reply_to_subscribe, notify, PV)
    yield Row("17", "PUBLISH_STATE_NOTIFY in a subscription", in_subscription, notify, LIVES)
    many = Close(SessionCode.TOO_MANY_REQUEST_UPDATES)
    for place, name in (
        (after_subscribe, "SUBSCRIBE"),
        (after_fetch, "FETCH"),
        (after_namespaces, "namespaces"),
    ):
        yield Row("18", f"17 unanswered updates of {name}", place, update(numbers=range(1, 18)), many)
        yield Row("18", f"16 unanswered updates of {name}", place, update(numbers=range(1, 17)), LIVES)
    yield Row(
        "18",
        "17 unlimited updates",
        after_subscribe,
        update(numbers=range(1, 18)),
        LIVES,
        limits=Limits(max_request_updates=0),
    )


def _replies() -> Iterator[Row]:
    with_properties = frame(REQUEST_OK, vi(0), vi(0x78, 1))
    yield Row("19", "Track Properties for SUBSCRIBE_NAMESPACE", reply_to_watch, with_properties, PV)
    yield Row("19", "Track Properties for PUBLISH_NAMESPACE", reply_to_announcement, with_properties, PV)
    yield Row("19", "Track Properties for REQUEST_UPDATE", in_update, with_properties, PV)
    yield Row("19", "Track Properties for TRACK_STATUS", reply_to_status, with_properties, LIVES, fin=True)
    here, gone = frame(NAMESPACE_, namespace(b"x")), frame(NAMESPACE_DONE, namespace(b"x"))
    yield Row("20", "NAMESPACE before the reply", reply_to_watch, here, PV)
    yield Row("20", "NAMESPACE_DONE before the reply", reply_to_watch, gone, PV)
    yield Row("20", "SUBSCRIBE_OK for SUBSCRIBE_NAMESPACE", reply_to_watch, SUBSCRIBED, PV)
    yield Row("20", "PUBLISH_SKIPPED for SUBSCRIBE_NAMESPACE", reply_to_watch, frame(0x0F, vi(0, 0)), PV)
    yield Row("20", "NAMESPACE_DONE before NAMESPACE", in_watch, gone, PV)
    yield Row("20", "NAMESPACE_DONE of another", in_watch, here + frame(0x0E, namespace(b"y")), PV)
    yield Row("20", "NAMESPACE_DONE twice", in_watch, here + gone + gone, PV)
    yield Row("20", "NAMESPACE again", in_watch, here + gone + here, LIVES)
    yield Row("21", "End before the start", reply_to_fetch, frame(FETCH_OK, vi(0, 0, 99, 0)), PV)
    yield Row("21", "End at the start", reply_to_fetch, frame(FETCH_OK, vi(0, 1, 0, 0)), LIVES)
    yield Row("22", "SUBSCRIBE_OK twice", reply_to_subscribe, SUBSCRIBED + SUBSCRIBED, PV)
    yield Row("22", "SUBSCRIBE_OK later again", in_subscription, SUBSCRIBED, PV)
    yield Row("22", "REQUEST_ERROR after SUBSCRIBE_OK", in_subscription, ERROR, PV)
    yield Row("22", "REQUEST_OK after SUBSCRIBE_OK", in_subscription, OK, PV)
    yield Row("22", "FETCH_OK twice", in_fetch, FETCHED, PV)
    yield Row("22", "REQUEST_ERROR after FETCH_OK", in_fetch, ERROR, PV)
    yield Row("22", "REQUEST_OK twice for SUBSCRIBE_NAMESPACE", in_watch, OK, PV)
    yield Row("22", "REQUEST_OK twice for PUBLISH_NAMESPACE", as_reply(hostile.publish_namespace, OK), OK, PV)
    yield Row("22", "two replies to one REQUEST_UPDATE", in_update, OK + OK, PV)
    for name, reply, place in (
        ("SUBSCRIBE", ERROR, reply_to_subscribe),
        ("FETCH", ERROR, reply_to_fetch),
        ("SUBSCRIBE_NAMESPACE", ERROR, reply_to_watch),
        ("TRACK_STATUS", OK, reply_to_status),
    ):
        yield Row("22", f"two final replies to {name} at once", place, reply + ERROR, PV)
    for name, reply, application in (
        ("SUBSCRIBE", ERROR, hostile.subscribe),
        ("FETCH", ERROR, hostile.fetch),
        ("SUBSCRIBE_NAMESPACE", ERROR, hostile.subscribe_namespace),
        ("TRACK_STATUS", OK, hostile.track_status),
    ):
        yield Row(
            "22", f"a final reply to {name} after the final one", as_reply(application, reply), ERROR, PV
        )
    yield Row("22", "PUBLISH_DONE twice", in_subscription, DONE + DONE, PV)
    yield Row("22", "FETCH_OK for SUBSCRIBE", reply_to_subscribe, FETCHED, PV)
    yield Row("22", "REQUEST_OK for SUBSCRIBE", reply_to_subscribe, OK, PV)
    yield Row("22", "SUBSCRIBE_OK for FETCH", reply_to_fetch, SUBSCRIBED, PV)
    yield Row("22", "REQUEST_OK for FETCH", reply_to_fetch, OK, PV)


def _data() -> Iterator[Row]:
    for flags, name in ((0x16, "mode 3"), (0x36, "mode 3"), (0x08, "bit 4 clear"), (0x20, "bit 4 clear")):
        yield Row(
            "23 S15", f"subgroup flags {flags:#x}, {name}", data_of_subscription, subgroup(flags, 0), PV
        )
    for flags in (0x80, 0x90, 0xF0):
        yield Row("23", f"subgroup flags {flags:#x}", data_of_subscription, subgroup(flags, 0), PV)
    for flags, name in (
        (0x10, "bit 4"),
        (0x30, "bit 4"),
        (0x40, "unknown bit"),
        (0x80, "unknown bit"),
        (0x22, "STATUS and END_OF_GROUP"),
        (0x2F, "STATUS and END_OF_GROUP"),
    ):
        yield Row("24", f"datagram flags {flags:#x}, {name}", as_datagram, vi(flags, 7, 0, 0) + b"\x80x", PV)
    yield Row("24", "datagram Properties of length 0", as_datagram, vi(0x0D, ALIAS, 0, 0) + b"x", PV)
    yield Row("24", "datagram Properties with a status", as_datagram, vi(0x2D, ALIAS, 0, 2, 0x78, 1, 3), PV)
    yield Row("24 S16", "a datagram nobody asked for", as_datagram, vi(0x0C, ALIAS, 0) + b"x", LIVES)
    yield Row("25", "Object ID overflow", data_of_subscription, subgroup(0x30, 0, item(MAXIMUM), item(0)), PV)
    later = record(0x0C, vi(MAXIMUM, 0), prefixed(b"x"))
    yield Row("25", "Group ID overflow", data_of_fetch, fetched(FIRST, later), PV)
    earlier = record(0x0C, vi(1, 0), prefixed(b"x"))
    yield Row("25", "Group ID underflow", data_backwards, fetched(FIRST, earlier), PV)
    yield Row(
        "25", "Group ID 0 is no underflow", data_backwards, fetched(FIRST, record(0x0C, vi(0, 0, 0))), LIVES
    )
    much = record(0x04, vi(MAXIMUM), prefixed(b"x"))
    second = record(0x04, vi(1), prefixed(b"x"))
    yield Row("25", "Object ID overflow of a fetch", data_of_fetch, fetched(FIRST, second, much), PV)
    last = record(0x1C, vi(1, MAXIMUM), b"\x80", prefixed(b"x"))
    yield Row(
        "25", "Object ID + 1 overflow of a fetch", data_of_fetch, fetched(last, record(0, prefixed(b"x"))), PV
    )
    for flags in (0x80, 0x8D, 0x100, 0x10D, 0x40C, 0x1234):
        yield Row(
            "26", f"fetch flags {flags:#x}", data_of_fetch, fetched(record(flags, vi(1, 0), b"\x80\1x")), PV
        )
    for flags, name in (
        (0x14, "without a Group ID"),
        (0x18, "without an Object ID"),
        (0x0C, "with the prior priority"),
        (0x1D, "with the prior Subgroup ID"),
        (0x1E, "with the prior Subgroup ID + 1"),
    ):
        yield Row(
            "26", f"first record {name}", data_of_fetch, fetched(record(flags, vi(1, 0), b"\x80\1x")), PV
        )
    for flags, name in ((0x04, "priority"), (0x15, "Subgroup ID"), (0x16, "Subgroup ID + 1")):
        data = END_OF_RANGE + record(flags, vi(1), b"\x80\1x")
        yield Row("26", f"prior {name} behind a mere marker", data_of_fetch, fetched(data), PV)
        yield Row("26", f"prior {name} behind marker and Object", data_of_fetch, fetched(FIRST, data), LIVES)
    for value in (1, 2, 5, MAXIMUM):
        yield Row(
            "27", f"Object Status {value}", data_of_subscription, subgroup(0x30, 0, status(0, value)), PV
        )
        yield Row("27", f"Object Status {value} in a datagram", as_datagram, vi(0x2C, ALIAS, 0, value), PV)
    for value in (3, 4):
        data = subgroup(0x31, 0, vi(0), prefixed(vi(0x78, 1)), vi(0, value))
        yield Row("28", f"Properties on status {value}", data_of_subscription, data, PV)
        data = subgroup(0x31, 0, vi(0, 0, 0, value))
        yield Row("28", f"no Properties on status {value}", data_of_subscription, data, LIVES)
    for name, data in {
        "a payload": subgroup(0x30, 0, vi(0, 9), b"x"),
        "a payload that has not begun": subgroup(0x30, 0, vi(0, 9)),
        "an Object's header": subgroup(0x30, 0, vi(0)),
        "Properties": subgroup(0x31, 0, vi(0, 9)),
        "its header": vi(0x30, ALIAS),
    }.items():
        yield Row("29", f"FIN inside {name}", data_of_subscription, data, PV, fin=True)
    for name, fetched_data in {
        "a payload": FIRST[:-1],
        "a record": FIRST[:2],
        "a marker": END_OF_RANGE[:-1],
    }.items():
        yield Row("29", f"FIN inside {name} of a fetch", data_of_fetch, fetched(fetched_data), PV, fin=True)
    yield Row("29", "FIN inside FETCH_HEADER", data_of_fetch, vi(0x05), PV, fin=True)


def _track_properties() -> Iterator[Row]:
    for name, value in {
        "group order 0": vi(0x22, 0),
        "group order 3": vi(0x22, 3),
        "DYNAMIC_GROUPS 2": vi(0x30, 2),
        "group order 3 in IMMUTABLE_PROPERTIES": vi(0x0B) + prefixed(vi(0x22, 3)),
    }.items():
        yield Row("30", f"{name} in SUBSCRIBE_OK", reply_to_subscribe, frame(4, vi(ALIAS, 0), value), PV)
        yield Row("30", f"{name} in FETCH_OK", reply_to_fetch, frame(0x18, vi(0, 9, 0, 0), value), PV)
        yield Row("30", f"{name} in TRACK_STATUS_OK", reply_to_status, frame(7, vi(0), value), PV)
        yield Row("30", f"{name} in PUBLISH", as_request, publish(value), PV)
    mandatory = vi(0x4000, 1)
    unsupported = Refuse(RequestCode.UNSUPPORTED_EXTENSION)
    yield Row("13.1", "mandatory property in PUBLISH", as_request, publish(mandatory), unsupported)
    yield Row(
        "13.1",
        "mandatory property in SUBSCRIBE_OK",
        reply_to_subscribe,
        frame(4, vi(ALIAS, 0), mandatory),
        LIVES,
    )


def _malformed() -> Iterator[Row]:
    properties = {
        "a mandatory property": vi(0x4000, 1),
        "nested IMMUTABLE_PROPERTIES": vi(0x0B) + prefixed(vi(0x0B, 0)),
        "IMMUTABLE_PROPERTIES cut off": vi(0x0B) + prefixed(vi(0x78)),
        "a gap below Group 0": vi(0x3C, 9),
        "a gap below Object 0": vi(0x3E, 9),
        "a gap twice": vi(0x3E, 0, 0, 0),
    }
    for name, value in properties.items():
        data = subgroup(0x31, 0, vi(0), prefixed(value), prefixed(b"x"))
        yield Row("36", f"{name} on an Object", data_of_subscription, data, CANCELS)
        fields = vi(1, 0), b"\x80", prefixed(value), prefixed(b"x")
        yield Row(
            "36", f"{name} on an Object of a fetch", data_of_fetch, fetched(record(0x3C, *fields)), CANCELS
        )
    data = subgroup(0x30, 0, status(0, 3), item(0))
    yield Row("36", "an Object behind End of Group", data_of_subscription, data, CANCELS)
    data = subgroup(0x30, 0, status(0, 4), item(0))
    yield Row("36", "an Object behind End of Track", data_of_subscription, data, CANCELS)
    data = subgroup(0x30, 0, item(5), status(0, 3), item(0))
    yield Row("36", "an Object beyond End of Group", data_of_subscription, data, CANCELS)
    again = record(0x04, vi(0), prefixed(b"y"))
    yield Row("36", "another payload on one fetch stream", data_of_fetch, fetched(FIRST, again), CANCELS)
    nested = vi(0x0B) + prefixed(vi(0x0B, 0))
    yield Row("36", "nested in SUBSCRIBE_OK", reply_to_subscribe, frame(4, vi(ALIAS, 0), nested), CANCELS)
    yield Row("36", "nested in FETCH_OK", reply_to_fetch, frame(0x18, vi(0, 9, 0, 0), nested), CANCELS)


def _setup() -> Iterator[Row]:
    path, authority = option(1, b"/p"), option(5, b"host:1")
    client, server = (CLIENT,), (SERVER,)
    for data, code in (
        (path, SessionCode.INVALID_PATH),
        (authority, SessionCode.INVALID_AUTHORITY),
        (option(1, b""), SessionCode.INVALID_PATH),
    ):
        yield Row("31", f"{code.name} {data.hex()}", as_setup, frame(SETUP, data), Close(code), roles=client)
    yield Row("31", "PATH from a client", as_setup, frame(SETUP, path), LIVES, roles=server)
    yield Row("31", "AUTHORITY from a client", as_setup, frame(SETUP, authority), LIVES, roles=server)
    yield Row("31", "neither from a client", as_setup, frame(SETUP), LIVES, roles=server)
    for value in (b"p", b"/p q", b"/%zz", b"/p#fragment"):
        code = SessionCode.MALFORMED_PATH
        yield Row(
            "31", f"path {value!r}", as_setup, frame(SETUP, option(1, value)), Close(code), roles=server
        )
    for value in (b"", b":1", b"host:port", b"me@host", b"[::1", b"host:65536"):
        code = SessionCode.MALFORMED_AUTHORITY
        yield Row(
            "31", f"authority {value!r}", as_setup, frame(SETUP, option(5, value)), Close(code), roles=server
        )


def _tokens() -> Iterator[Row]:
    delete, register, use_alias, use_value = 0, 1, 2, 3
    duplicate = Close(SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS)
    overflow = Close(SessionCode.AUTH_TOKEN_CACHE_OVERFLOW)
    unknown = Refuse(RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS)
    small = Limits(max_auth_token_cache_size=20)
    first = about(SUBSCRIBE, token(register, 1, 0, value=b"abcd"))

    def second(*arguments: int, value: bytes = b"") -> Bytes:
        return about(FETCH, token(*arguments, value=value), number=1)

    again = _after_another(first)
    yield Row("32", "REGISTER of an alias in use", again, second(register, 1, 0, value=b"x"), duplicate)
    yield Row("32", "REGISTER of another alias", again, second(register, 2, 0, value=b"x"), LIVES)
    yield Row("32", "USE_ALIAS", again, second(use_alias, 1), LIVES)
    yield Row("32", "DELETE", again, second(delete, 1), LIVES)
    yield Row(
        "32",
        "DELETE and REGISTER in one message",
        again,
        about(
            FETCH,
            "0203" + prefixed(vi(delete, 1)).hex() + "00" + prefixed(vi(register, 1, 0) + b"efgh").hex(),
            number=1,
        ),
        LIVES,
        limits=small,
    )
    rejected = _after_another(
        about(SUBSCRIBE, token(register, 1, 0), FullTrackName(NAMESPACE, b"not offered"))
    )
    yield Row("32", "REGISTER in a rejected message", rejected, second(use_alias, 1), LIVES)
    yield Row("32", "REGISTER again after a rejected message", rejected, second(register, 1, 0), duplicate)
    yield Row("32", "cache full to the last byte", as_request, first, LIVES, limits=small)
    yield Row("32", "cache overflow by one token", again, second(register, 2, 0), overflow, limits=small)
    too_much = about(SUBSCRIBE, token(register, 1, 0, value=b"abcde"))
    yield Row("32", "cache overflow by one byte", as_request, too_much, overflow, limits=small)
    none = Limits(max_auth_token_cache_size=0)
    yield Row(
        "32 S19",
        "REGISTER without a cache",
        as_request,
        about(FETCH, token(register, 1, 0)),
        overflow,
        limits=none,
    )
    yield Row(
        "32", "overflow in an update", after_subscribe, update(token(register, 1, 0)), overflow, limits=none
    )
    yield Row(
        "32 S19", "USE_ALIAS of an unknown alias", as_request, about(SUBSCRIBE, token(use_alias, 77)), unknown
    )
    yield Row("32", "DELETE of an unknown alias", as_request, about(FETCH, token(delete, 77)), unknown)
    yield Row("32", "USE_VALUE", as_request, about(SUBSCRIBE, token(use_value, 0, value=b"x")), LIVES)
    yield Row("32", "unknown Token Type", as_request, about(SUBSCRIBE, token(use_value, 0x9D)), LIVES)

    def in_setup(*fields: int, value: bytes = b"") -> bytes:
        return frame(SETUP, option(3, vi(*fields) + value))

    for kind, name in ((delete, "DELETE"), (use_alias, "USE_ALIAS")):
        yield Row("32", f"{name} in SETUP", as_setup, in_setup(kind, 1), PV, roles=(SERVER,))
    yield Row(
        "32", "REGISTER in SETUP that does not fit", as_setup, in_setup(register, 1, 0), LIVES, limits=none
    )
    twice = frame(SETUP, option(3, vi(register, 1, 0)), option(0, vi(register, 1, 0, 5)))
    yield Row("32", "REGISTER twice in SETUP", as_setup, twice, duplicate)
    taken = _after_setup(in_setup(register, 1, 0))
    yield Row("32", "alias of SETUP in use", taken, about(SUBSCRIBE, token(register, 1, 0)), duplicate)
    yield Row("32", "USE_ALIAS of an alias of SETUP", taken, about(SUBSCRIBE, token(use_alias, 1)), LIVES)
    dropped = _after_setup(in_setup(register, 1, 0, value=b"x" * 5))
    yield Row(
        "32",
        "USE_ALIAS of an alias of SETUP that did not fit",
        dropped,
        about(SUBSCRIBE, token(use_alias, 1)),
        unknown,
        limits=small,
    )


def _after_setup(data: bytes) -> Place:
    """A request behind another SETUP than the usual one."""

    async def place(peer: Hostile, request: bytes, fin: bool) -> Stream:
        await peer.open_control(data)
        return await peer.request(request, fin=fin)

    place.__name__ = "after_setup"
    return place


def _filters() -> Iterator[Row]:
    def ranges(kind: int, body: bytes) -> str:
        return "01" + (vi(kind) + prefixed(body)).hex()

    def several(count: int) -> bytes:
        return b"\0" + b"\1\1" * count

    limits = Limits(max_filter_ranges=16)
    faults = {
        "17 Ranges": ranges(0x26, several(17)),
        "a PRIORITY of 256": ranges(0x27, b"\0" + vi(256, 0)),
        "an odd property type": ranges(0x28, b"\0" + vi(0x79, 1, 1)),
        "a value above 2^64-1": ranges(0x26, b"\0" + vi(MAXIMUM, 1)),
        "a Range twice": "0226030001010003000101",
        "no Range": ranges(0x25, b"\0"),
    }
    for name, parameters in faults.items():
        for kind, request in ((SUBSCRIBE, "SUBSCRIBE"), (FETCH, "FETCH")):
            yield Row(
                "34 S20",
                f"{name} in {request}",
                as_request,
                about(kind, parameters),
                INVALID_FILTER,
                limits=limits,
            )
        inner = prefixed(bytes.fromhex(parameters)).hex()
        yield Row(
            "34",
            f"{name} in a fill",
            as_request,
            about(SUBSCRIBE, "0123" + inner),
            INVALID_FILTER,
            limits=limits,
        )
    for kind, request in ((SUBSCRIBE, "SUBSCRIBE"), (FETCH, "FETCH")):
        yield Row(
            "34",
            f"16 Ranges in {request}",
            as_request,
            about(kind, ranges(0x26, several(16))),
            LIVES,
            limits=limits,
        )
        yield Row(
            "34",
            f"17 Ranges in two filters of {request}",
            as_request,
            about(kind, "0225" + prefixed(several(8)).hex() + "01" + prefixed(several(9)).hex()),
            INVALID_FILTER,
            limits=limits,
        )
        yield Row(
            "34",
            f"one Range where none is allowed in {request}",
            as_request,
            about(kind, ranges(0x26, several(1))),
            INVALID_FILTER,
            limits=Limits(max_filter_ranges=0),
        )


def _reserved() -> Iterator[Row]:
    for fields in ((b".",), (b".", b"x"), (b".session",), (b".session", b"x")):
        text = b"/".join(fields).decode()
        for kind in (SUBSCRIBE, FETCH, TRACK_STATUS):
            for name in (b"t", b""):
                track = FullTrackName(fields, name)
                yield Row(
                    "35 S17",
                    f"{kind:#x} {text} {name!r}",
                    as_request,
                    about(kind, track=track),
                    DOES_NOT_EXIST,
                )
        for kind in (PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS):
            yield Row("35", f"{kind:#x} {text}", as_request, under(kind, namespace(*fields)), DOES_NOT_EXIST)
    other = FullTrackName((b".other", b"x"), b"t")
    yield Row(
        "35", "an unknown reserved namespace", as_request, about(SUBSCRIBE, track=other), DOES_NOT_EXIST
    )


def _harmless() -> Iterator[Row]:
    yield Row("S16", "padding stream", as_stream, vi(0x132B3E28) + bytes(99), LIVES, fin=True)
    yield Row("S16", "padding datagram", as_datagram, vi(0x132B3E29) + bytes(99), LIVES)
    yield Row("S16", "subgroup of an unknown alias", as_stream, vi(0x30, 999, 0) + item(0), LIVES, fin=True)
    yield Row(
        "S16", "flags that are not minimal", as_stream, b"\x80\x50" + vi(999, 0) + b"\x80" + item(0), LIVES
    )
    yield Row("S16", "grease in SETUP", as_setup, frame(SETUP, vi(0x9D, 2), b"ab", vi(0x7F, 5)), LIVES)
    yield Row("S16", "grease twice in SETUP", as_setup, bytes.fromhex("af000005809d000000"), LIVES)
    yield Row("S16", "fetch stream nobody asked for", as_stream, vi(0x05, 99), LIVES, fin=True)
    yield Row("19", "grease in Track Properties", reply_to_subscribe, frame(4, vi(ALIAS, 0, 0x11C, 1)), LIVES)
    for kind, place in ((REQUEST_ERROR, reply_to_subscribe), (PUBLISH_DONE, in_subscription)):
        yield Row(
            "19", f"grease code in message {kind:#x}", place, frame(kind, vi(0x19B, 0, 0)), LIVES, fin=True
        )
    yield Row("33", "more streams than PUBLISH_DONE counts", _more_streams, DONE, LIVES)
    yield Row("18", "SETUP of 65535 bytes", as_setup, frame(SETUP, option(0x9D, bytes(65530))), LIVES)
    yield Row("2.1", "a Request ID that is not minimal", as_request, _not_minimal, LIVES)
    yield Row(
        "5.2",
        "SUBSCRIBER_PRIORITY in SUBSCRIBE_TRACKS",
        as_request,
        under(0x51, namespace(), "012001"),
        LIVES,
    )


async def _more_streams(peer: Hostile, data: bytes, fin: bool) -> None:
    request = await peer.ask(hostile.subscribe)
    await request.write(SUBSCRIBED)
    for group in range(3):
        await peer.stream(subgroup(0x30, group, item(0)), fin=True)
    await request.write(data, fin=True)


def _not_minimal(ids: Ids) -> bytes:
    return frame(SUBSCRIBE, bytes((0x80, ids.mine)), full_name(OFFERED), vi(0))


ROWS = [
    *_unknown(),
    *_lengths(),
    *_openers(),
    *_control(),
    *_parameters(),
    *_pairs(),
    *_names(),
    *_texts(),
    *_goaway(),
    *_request_ids(),
    *_subscriptions(),
    *_replies(),
    *_data(),
    *_track_properties(),
    *_malformed(),
    *_setup(),
    *_tokens(),
    *_filters(),
    *_reserved(),
    *_harmless(),
]


@pytest.mark.parametrize(
    ("row", "session_is_client"),
    [
        pytest.param(row, role, id=f"{row.rule}: {row.what}, {'client' if role else 'server'}")
        for row in ROWS
        for role in row.roles
    ],
)
async def test_row(row: Row, session_is_client: bool) -> None:
    before_setup = row.place is as_setup or row.place.__name__ == "after_setup"
    scene = Scene(setup=None, limits=row.limits) if before_setup else Scene(limits=row.limits)
    async with meeting(session_is_client, scene) as peer:
        stream = await row.place(peer, peer.spell(row.data), row.fin)
        await row.reaction.check(peer, stream)


# The end of a request.

REJECTABLE: dict[str, Application] = {
    "SUBSCRIBE": hostile.subscribe,
    "FETCH": hostile.fetch,
    "TRACK_STATUS": hostile.track_status,
    "SUBSCRIBE_NAMESPACE": hostile.subscribe_namespace,
    "PUBLISH_NAMESPACE": hostile.publish_namespace,
}
every_application = pytest.mark.parametrize("application", REJECTABLE.values(), ids=REJECTABLE)
both_roles = pytest.mark.parametrize("session_is_client", BOTH, ids=["client", "server"])


@both_roles
@every_application
async def test_a_rejected_request_is_finished(session_is_client: bool, application: Application) -> None:
    """Its FIN is sent, and the peer's taken (moqt 3.4)."""
    async with meeting(session_is_client) as peer:
        stream = await peer.ask(application)
        await stream.write(ERROR, fin=True)
        with pytest.raises(RequestRejected):
            await in_time(peer.asked[-1])
        assert await read_all(stream) == b""
        await peer.assert_alive()
        assert stream.stopped is None


@both_roles
@every_application
async def test_a_peer_that_goes_on_after_its_rejection_is_stopped(
    session_is_client: bool, application: Application
) -> None:
    """What it says does not stay unread for ever: it would take the connection's window (moqt 21)."""
    async with meeting(session_is_client) as peer:
        stream = await peer.ask(application)
        await stream.write(ERROR)
        stopped = asyncio.get_running_loop().create_future()
        stream.on_stopped = stopped.set_result
        assert await in_time(stopped) == ResetCode.CANCELLED
        await peer.assert_alive()


@both_roles
@every_application
async def test_fin_without_a_reply_fails_the_request(
    session_is_client: bool, application: Application
) -> None:
    """It is cancelled, so that its stream goes; the session stays (moqt 3.4)."""
    async with meeting(session_is_client) as peer:
        stream = await peer.ask(application)
        await stream.write(b"", fin=True)
        with pytest.raises(RequestRejected):
            await in_time(peer.asked[-1])
        if application is not hostile.track_status:  # It had sent FIN before.
            with pytest.raises(StreamReset):
                await read_all(stream)
        await peer.assert_alive()


@both_roles
@every_application
async def test_no_reply_in_time_costs_the_request(session_is_client: bool, application: Application) -> None:
    async with meeting(session_is_client) as peer:
        stream = await peer.ask(application)
        with pytest.raises(DeadlineExceeded):
            await in_time(peer.asked[-1])
        if application is not hostile.track_status:  # It had sent FIN before.
            with pytest.raises(StreamReset):
                await read_all(stream)
        await peer.assert_alive()
        assert stream.stopped == ResetCode.CANCELLED


@both_roles
async def test_no_setup_in_time_closes_the_session(session_is_client: bool) -> None:
    async with meeting(session_is_client, Scene(setup=None)) as peer:
        assert await peer.close_code() == SessionCode.CONTROL_MESSAGE_TIMEOUT


# What comes before SETUP (moqt 3.1).


@both_roles
async def test_a_request_before_setup_is_served_after_it(session_is_client: bool) -> None:
    async with meeting(session_is_client, Scene(setup=None)) as peer:
        request = Subscribe(peer.ids.mine, OFFERED)
        stream = await peer.request(encode(request))
        reading = asyncio.create_task(messages(stream, request, 1))
        for _ in range(2):
            await in_time(peer.connection.ping())
        assert not reading.done()
        await peer.open_control(encode(Setup()))
        assert isinstance((await reading)[0], SubscribeOk)
        await peer.assert_alive()


@both_roles
async def test_a_violation_before_setup_closes_the_session(session_is_client: bool) -> None:
    async with meeting(session_is_client, Scene(setup=None)) as peer:
        await peer.request(OK)
        assert await peer.close_code() == SessionCode.PROTOCOL_VIOLATION


@both_roles
async def test_setup_byte_by_byte(session_is_client: bool) -> None:
    data = frame(SETUP, option(0x9D, b"abc"))
    async with meeting(session_is_client, Scene(setup=None)) as peer:
        await peer.open_control(data[:1])
        for at in range(1, len(data)):
            await peer.say(data[at : at + 1])
            await in_time(peer.connection.ping())
        await peer.assert_alive()


# What was seen on the wire of another implementation (moqt 26.7), where no row has it.


async def test_s05_what_a_publisher_of_aiomoqt_says() -> None:
    """The subscription has Request ID 1, the fetch 3: the session is the server."""

    async def subscribe_and_fetch(session: Session) -> list[object]:
        whole = LocationFilter.absolute_range(Location(0, 0), Location(1, 1))
        async with (
            await session.subscribe(WANTED),
            await session.fetch(WANTED, filter=whole) as objects,
        ):
            return [known.payload async for known in objects if isinstance(known, ReceivedObject)]

    async with meeting(SERVER) as peer:
        subscription = await peer.ask(subscribe_and_fetch)
        await subscription.write(bytes.fromhex("040009050109010104c927c0"))
        fetch = await peer.accept()
        records = "1c0000800467306f30 000467306f31 0c00000467316f30 000467316f31"
        await peer.stream(bytes.fromhex("0503" + records), fin=True)
        await fetch.write(bytes.fromhex("18000400010100"), fin=True)
        assert await in_time(peer.asked[-1]) == [b"g0o0", b"g0o1", b"g1o0", b"g1o1"]
        await peer.assert_alive()


async def test_s09_the_end_of_a_track() -> None:
    async with meeting(SERVER) as peer:
        subscription = await peer.ask(hostile.subscribe)
        await subscription.write(SUBSCRIBED)
        await peer.stream(subgroup(0x30, 0, item(0)), fin=True)
        await peer.stream(subgroup(0x30, 1, item(0)), fin=True)
        await subscription.write(bytes.fromhex("0b0003020200"), fin=True)
        items = await in_time(peer.asked[-1])
        assert isinstance(items, list)
        assert len([known for known in items if isinstance(known, ReceivedObject)]) == 2
        assert await read_all(subscription) == b""


async def test_s22_what_a_subscriber_of_aiomoqt_says() -> None:
    setup = "af00002601042f6d6f71040e3132372e302e302e313a34343935020e61696f6d6f71742f302e31332e33"
    subscribe = "0300170002066b7663732d310573636f7065026b300210011105"
    async with meeting(SERVER, Scene(setup=bytes.fromhex(setup))) as peer:
        options = peer.session.peer_setup
        assert (options.path, options.authority) == ("/moq", "127.0.0.1:4495")
        assert options.implementation == "aiomoqt/0.13.3"
        await assert_refused(await peer.request(bytes.fromhex(subscribe)), RequestCode.DOES_NOT_EXIST)
        await peer.assert_alive()


async def test_s23_what_a_publisher_of_aiomoqt_offers() -> None:
    """PUBLISH is declined: this endpoint subscribes to what it wants."""
    publish = "1d00160002066b7663732d310573636f7065026b3000011000"
    async with meeting(SERVER) as peer:
        await assert_refused(await peer.request(bytes.fromhex(publish)), RequestCode.UNINTERESTED)
        await peer.assert_alive()
