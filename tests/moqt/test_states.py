"""The states of a request: every (request, sender, state, message), against the table of moqt 4.1 and what
3.4 and 16 add to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.errors import ProtocolError, RequestRejected, SessionCode, StreamReset, UsageError
from moqt.filters import Location
from moqt.names import FullTrackName
from moqt.quic.api import Stream
from moqt.quic.link import pair
from moqt.requests import RequestIds, RequestStream
from moqt.states import RequestState, Sender
from moqt.wire import (
    Fetch,
    FetchOk,
    Goaway,
    Message,
    Namespace,
    NamespaceDone,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    Request,
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
)

pytestmark = pytest.mark.virtual

TRACK = FullTrackName((b"a",), b"t")
PENDING, ESTABLISHED = RequestState.PENDING, RequestState.ESTABLISHED
REJECTED, DONE = RequestState.REJECTED, RequestState.DONE
REQUESTER, RESPONDER = Sender.REQUESTER, Sender.RESPONDER

REQUESTS: dict[str, Request] = {
    "SUBSCRIBE": Subscribe(0, TRACK),
    "PUBLISH": Publish(0, TRACK, 1),
    "FETCH": Fetch(0, TRACK),
    "TRACK_STATUS": TrackStatus(0, TRACK),
    "PUBLISH_NAMESPACE": PublishNamespace(0, (b"a",)),
    "SUBSCRIBE_NAMESPACE": SubscribeNamespace(0, (b"a",)),
    "SUBSCRIBE_TRACKS": SubscribeTracks(0, (b"a",)),
}
MESSAGES: dict[str, Message] = {
    "SETUP": Setup(),
    "GOAWAY": Goaway(),
    "SUBSCRIBE_OK": SubscribeOk(1),
    "REQUEST_UPDATE": RequestUpdate(2),
    "REQUEST_OK": RequestOk(),
    "REQUEST_ERROR": RequestError(0x10),
    "PUBLISH_DONE": PublishDone(2, 0),
    "PUBLISH_STATE_NOTIFY": PublishStateNotify(),
    "FETCH_OK": FetchOk(False, Location(0, 0)),
    "NAMESPACE": Namespace((b"b",)),
    "NAMESPACE_DONE": NamespaceDone((b"b",)),
    "PUBLISH_SKIPPED": PublishSkipped((b"b",), b"t"),
    **REQUESTS,
}

# What each side may say, and the state after it where that changes. An UPDATE is outstanding wherever a reply
# to one is listed.
ALLOWED = """
SUBSCRIBE            requester  pending      GOAWAY REQUEST_UPDATE
SUBSCRIBE            requester  established  GOAWAY REQUEST_UPDATE
SUBSCRIBE            requester  rejected     GOAWAY REQUEST_UPDATE
SUBSCRIBE            requester  done         GOAWAY REQUEST_UPDATE
SUBSCRIBE            responder  pending      GOAWAY SUBSCRIBE_OK>established REQUEST_ERROR>rejected
SUBSCRIBE            responder  established  GOAWAY REQUEST_OK REQUEST_ERROR PUBLISH_STATE_NOTIFY PUBLISH_DONE>done
PUBLISH              requester  pending      GOAWAY REQUEST_UPDATE PUBLISH_STATE_NOTIFY PUBLISH_DONE>done
PUBLISH              requester  established  GOAWAY REQUEST_UPDATE PUBLISH_STATE_NOTIFY PUBLISH_DONE>done REQUEST_OK REQUEST_ERROR
PUBLISH              requester  rejected     GOAWAY REQUEST_UPDATE PUBLISH_STATE_NOTIFY PUBLISH_DONE
PUBLISH              responder  pending      GOAWAY REQUEST_OK>established REQUEST_ERROR>rejected
PUBLISH              responder  established  GOAWAY REQUEST_OK REQUEST_ERROR REQUEST_UPDATE
PUBLISH              responder  done         GOAWAY REQUEST_OK REQUEST_ERROR REQUEST_UPDATE
FETCH                requester  pending      GOAWAY REQUEST_UPDATE
FETCH                requester  established  GOAWAY REQUEST_UPDATE
FETCH                requester  rejected     GOAWAY REQUEST_UPDATE
FETCH                responder  pending      GOAWAY FETCH_OK>established REQUEST_ERROR>rejected
FETCH                responder  established  GOAWAY REQUEST_OK REQUEST_ERROR
TRACK_STATUS         requester  pending      GOAWAY
TRACK_STATUS         requester  rejected     GOAWAY
TRACK_STATUS         requester  done         GOAWAY
TRACK_STATUS         responder  pending      GOAWAY REQUEST_OK>done REQUEST_ERROR>rejected
PUBLISH_NAMESPACE    requester  pending      GOAWAY REQUEST_UPDATE
PUBLISH_NAMESPACE    requester  established  GOAWAY REQUEST_UPDATE
PUBLISH_NAMESPACE    requester  rejected     GOAWAY REQUEST_UPDATE
PUBLISH_NAMESPACE    responder  pending      GOAWAY REQUEST_OK>established REQUEST_ERROR>rejected
PUBLISH_NAMESPACE    responder  established  GOAWAY REQUEST_OK REQUEST_ERROR
SUBSCRIBE_NAMESPACE  requester  pending      GOAWAY REQUEST_UPDATE
SUBSCRIBE_NAMESPACE  requester  established  GOAWAY REQUEST_UPDATE
SUBSCRIBE_NAMESPACE  requester  rejected     GOAWAY REQUEST_UPDATE
SUBSCRIBE_NAMESPACE  responder  pending      GOAWAY REQUEST_OK>established REQUEST_ERROR>rejected
SUBSCRIBE_NAMESPACE  responder  established  GOAWAY REQUEST_OK REQUEST_ERROR NAMESPACE NAMESPACE_DONE
SUBSCRIBE_TRACKS     requester  pending      GOAWAY REQUEST_UPDATE
SUBSCRIBE_TRACKS     requester  established  GOAWAY REQUEST_UPDATE
SUBSCRIBE_TRACKS     requester  rejected     GOAWAY REQUEST_UPDATE
SUBSCRIBE_TRACKS     responder  pending      GOAWAY REQUEST_OK>established REQUEST_ERROR>rejected
SUBSCRIBE_TRACKS     responder  established  GOAWAY REQUEST_OK REQUEST_ERROR PUBLISH_SKIPPED
"""  # noqa: E501 a table

# How a request gets into a state: who says what after the request itself.
ROADS: dict[tuple[str, RequestState], list[tuple[Sender, str]]] = {
    ("SUBSCRIBE", DONE): [(RESPONDER, "SUBSCRIBE_OK"), (RESPONDER, "PUBLISH_DONE")],
    ("PUBLISH", DONE): [(REQUESTER, "PUBLISH_DONE")],
    ("TRACK_STATUS", DONE): [(RESPONDER, "REQUEST_OK")],
    **{(request, PENDING): [] for request in REQUESTS},
    **{(request, REJECTED): [(RESPONDER, "REQUEST_ERROR")] for request in REQUESTS},
    **{
        (request, ESTABLISHED): [
            (RESPONDER, {"SUBSCRIBE": "SUBSCRIBE_OK", "FETCH": "FETCH_OK"}.get(request, "REQUEST_OK"))
        ]
        for request in REQUESTS
        if request != "TRACK_STATUS"
    },
}
CASES = [
    pytest.param(request, sender, state, id=f"{request}-{sender.value}-{state.name}")
    for request, state in ROADS
    for sender in Sender
]


def _parse() -> dict[tuple[str, Sender, RequestState], dict[str, RequestState]]:
    table = {}
    for line in ALLOWED.strip().splitlines():
        request, sender, state, *messages = line.split()
        before = RequestState[state.upper()]
        after = {}
        for message in messages:
            name, _, then = message.partition(">")
            after[name] = RequestState[then.upper()] if then else before
        table[request, Sender(sender), before] = after
    return table


TABLE = _parse()


def test_the_table_has_no_row_that_no_road_leads_to() -> None:
    assert {(request, state) for request, _, state in TABLE} <= set(ROADS)


@asynccontextmanager
async def scene(
    request: str, speaker: Sender, state: RequestState, *, update: bool
) -> AsyncIterator[tuple[RequestStream, Stream]]:
    """A RequestStream that hears `speaker`, and the speaker's end of the stream, in a state of the request.

    With `update`, the listener has sent a REQUEST_UPDATE that is not answered, where it may.
    """
    link = pair()
    requester_end = link.client.open(bidirectional=True)
    first = REQUESTS[request]
    local = RESPONDER if speaker is REQUESTER else REQUESTER
    if local is REQUESTER:
        channel = RequestStream(
            requester_end,
            local=local,
            is_client=True,
            max_updates=0,
            ids=RequestIds(is_client=True),
            request=first,
        )
        await channel.send_request()
        script = await link.server.accept()
    else:
        script = requester_end
        await script.write(encode(first))
        stream = await link.server.accept()
        channel = RequestStream(
            stream, local=local, is_client=False, max_updates=0, ids=RequestIds(is_client=False)
        )
        assert await channel.receive() == first
    updates = update and "REQUEST_UPDATE" in TABLE.get((request, local, ESTABLISHED), {})
    for sender, message in ROADS[request, state]:
        if sender is local:
            await channel.send(MESSAGES[message])
        else:
            await script.write(encode(MESSAGES[message]))
            assert await channel.receive() == MESSAGES[message]
    if updates and state is ESTABLISHED:
        await channel.send(MESSAGES["REQUEST_UPDATE"])
    assert channel.state is state
    yield channel, script
    link.client.close()
    await asyncio.gather(link.client.wait_closed(), link.server.wait_closed())


def peer_update(speaker: Sender) -> RequestUpdate:
    """An update whose Request ID the speaker may use: the requester of `scene` is the client."""
    return RequestUpdate(2 if speaker is REQUESTER else 1)


@pytest.mark.parametrize(("request_name", "speaker", "state"), CASES)
async def test_what_the_peer_may_say(request_name: str, speaker: Sender, state: RequestState) -> None:
    allowed = TABLE.get((request_name, speaker, state), {})
    for name, message in MESSAGES.items():
        async with scene(request_name, speaker, state, update=True) as (channel, script):
            said = peer_update(speaker) if name == "REQUEST_UPDATE" else message
            await script.write(encode(said))
            if name in allowed:
                assert await channel.receive() == said
                assert channel.state is allowed[name], name
            else:
                with pytest.raises(ProtocolError) as caught:
                    await channel.receive()
                assert caught.value.code == SessionCode.PROTOCOL_VIOLATION, name


@pytest.mark.parametrize(("request_name", "speaker", "state"), CASES)
async def test_what_we_may_say(request_name: str, speaker: Sender, state: RequestState) -> None:
    """The same table binds us."""
    local = RESPONDER if speaker is REQUESTER else REQUESTER
    allowed = TABLE.get((request_name, local, state), {})
    for name, message in MESSAGES.items():
        async with scene(request_name, speaker, state, update=False) as (channel, _script):
            if name in allowed:
                await channel.send(message)
                assert channel.state is allowed[name], name
            else:
                with pytest.raises(UsageError):
                    await channel.send(message)
                assert channel.state is state


@pytest.mark.parametrize(("request_name", "speaker", "state"), CASES)
async def test_where_the_peer_may_end(request_name: str, speaker: Sender, state: RequestState) -> None:
    """FIN before all that is owed fails the request, and not the session (moqt 3.4)."""
    owes_done = (request_name, speaker) in {("SUBSCRIBE", RESPONDER), ("PUBLISH", REQUESTER)}
    owes = (state in (PENDING, ESTABLISHED) and owes_done) or (state is PENDING and speaker is RESPONDER)
    async with scene(request_name, speaker, state, update=False) as (channel, script):
        await script.write(b"", fin=True)
        if owes:
            with pytest.raises(RequestRejected):
                await channel.receive()
        else:
            assert await channel.receive() is None


@pytest.mark.parametrize("answer", ["REQUEST_OK", "REQUEST_ERROR"])
@pytest.mark.parametrize("request_name", ["SUBSCRIBE", "FETCH", "PUBLISH_NAMESPACE", "SUBSCRIBE_NAMESPACE"])
async def test_a_reply_to_no_update(request_name: str, answer: str) -> None:
    """Two final replies to one request (moqt 20 #22)."""
    async with scene(request_name, RESPONDER, ESTABLISHED, update=False) as (channel, script):
        await script.write(encode(MESSAGES[answer]))
        with pytest.raises(ProtocolError) as caught:
            await channel.receive()
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


async def test_one_reply_for_each_update() -> None:
    async with scene("FETCH", RESPONDER, ESTABLISHED, update=False) as (channel, script):
        await channel.send(RequestUpdate(2))
        await channel.send(RequestUpdate(4))
        await script.write(encode(RequestOk()) * 3)
        with pytest.raises(ProtocolError):
            await channel.receive()


@pytest.mark.parametrize("cut", range(1, 8))
async def test_fin_inside_a_message(cut: int) -> None:
    async with scene("SUBSCRIBE", RESPONDER, PENDING, update=False) as (channel, script):
        await script.write(encode(SubscribeOk(1))[:-1][:cut], fin=True)
        with pytest.raises(ProtocolError) as caught:
            await channel.receive()
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


async def test_a_stream_without_its_request() -> None:
    link = pair()
    stream = link.client.open(bidirectional=True)
    await stream.write(b"", fin=True)
    channel = RequestStream(
        await link.server.accept(),
        local=RESPONDER,
        is_client=False,
        max_updates=0,
        ids=RequestIds(is_client=False),
    )
    with pytest.raises(ProtocolError):
        await channel.receive()
    link.client.close()
    await asyncio.gather(link.client.wait_closed(), link.server.wait_closed())


async def test_cancelled_while_it_is_read() -> None:
    async with scene("SUBSCRIBE", RESPONDER, ESTABLISHED, update=False) as (channel, script):
        reading = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(0.1)
        channel.cancel()
        with pytest.raises(StreamReset):
            await reading
        await asyncio.sleep(0.1)
        with pytest.raises(StreamReset):
            await script.read()
        assert script.stopped is not None
        assert channel.cancelled
        assert channel.over
        await channel.finish()  # It has no effect then.
        await channel.drain()


async def test_a_reset_is_a_cancel() -> None:
    async with scene("SUBSCRIBE", RESPONDER, ESTABLISHED, update=False) as (channel, script):
        script.reset(4)
        with pytest.raises(StreamReset) as caught:
            await channel.receive()
        assert caught.value.code == 4


async def test_a_flood_of_small_messages_is_decoded_piece_by_piece() -> None:
    async with scene("SUBSCRIBE_NAMESPACE", RESPONDER, ESTABLISHED, update=False) as (channel, script):
        one = encode(Namespace((b"b",)))
        await script.write(one * 20_000)
        for _ in range(20_000):
            assert await channel.receive() == Namespace((b"b",))
            assert len(channel._received) <= 16 * 1024 / len(one) + 1
