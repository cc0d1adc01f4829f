"""Request IDs, and how messages go over a request stream; what may be said when is in test_states."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import ProtocolError, SessionCode, StreamReset, StreamStopped, UsageError
from moqt.names import FullTrackName
from moqt.quic.api import QuicOptions, Stream
from moqt.quic.link import pair
from moqt.requests import RequestIds, RequestStream, subject_of
from moqt.states import Sender
from moqt.wire import (
    Message,
    MessageDecoder,
    Namespace,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    encode,
)

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(("is_client", "expected"), [(True, [0, 2, 4]), (False, [1, 3, 5])])
def test_our_ids(is_client: bool, expected: list[int]) -> None:
    ids = RequestIds(is_client=is_client)
    assert [ids.next() for _ in range(3)] == expected


@given(is_client=st.booleans(), numbers=st.lists(st.integers(0, 30)))
def test_ids_of_the_peer_against_a_set(is_client: bool, numbers: list[int]) -> None:
    ids, seen = RequestIds(is_client=is_client), set[int]()
    for number in numbers:
        if number % 2 != is_client or number in seen:
            with pytest.raises(ProtocolError) as caught:
                ids.check(number)
            assert caught.value.code == SessionCode.INVALID_REQUEST_ID
        else:
            ids.check(number)
            seen.add(number)


def test_ids_in_any_order_stay_compact() -> None:
    ids = RequestIds(is_client=False)
    numbers = list(range(0, 20_000, 2))
    random.Random(3).shuffle(numbers)
    for number in numbers:
        ids.check(number)
    assert not ids._gaps
    for number in numbers[:100]:
        with pytest.raises(ProtocolError):
            ids.check(number)


@asynccontextmanager
async def watching(narrow: bool = True) -> AsyncIterator[tuple[RequestStream, Stream]]:
    """The responder of a SUBSCRIBE_NAMESPACE, accepted; and the requester's end."""
    options = QuicOptions(max_stream_data=4096, max_data=8192) if narrow else QuicOptions()
    link = pair(client=options, server=options, chunk=100)
    script = link.client.open(bidirectional=True)
    await script.write(encode(SubscribeNamespace(0, (b"a",))))
    channel = RequestStream(
        await link.server.accept(),
        local=Sender.RESPONDER,
        is_client=False,
        max_updates=0,
        ids=RequestIds(is_client=False),
    )
    await channel.receive()
    await channel.send(RequestOk())
    yield channel, script
    link.client.close()
    await asyncio.gather(link.client.wait_closed(), link.server.wait_closed())


async def read_messages(script: Stream, count: int) -> list[Message]:
    decoder, found = MessageDecoder(request=SubscribeNamespace), list[Message]()
    while len(found) < count:
        data = await script.read()
        assert data
        found += decoder.feed(data)
    return found


async def test_messages_of_several_tasks_do_not_mix() -> None:
    """Though each is larger than what may be sent at once."""
    async with watching() as (channel, script):
        names = [Namespace((b"%d" % number * 2000,)) for number in range(9)]
        sending = [asyncio.ensure_future(channel.send(name)) for name in names]
        assert await read_messages(script, 10) == [RequestOk(), *names]
        await asyncio.gather(*sending)


async def test_a_sender_that_is_cancelled_in_the_middle_of_its_message() -> None:
    """Nothing can follow half a message: the request is cancelled."""
    async with watching() as (channel, script):
        sending = asyncio.ensure_future(channel.send(Namespace((b"x" * 4000, b"y" * 90))))
        waiting = asyncio.ensure_future(channel.send(Namespace((b"z",) * 20)))
        await asyncio.sleep(0.1)
        assert not sending.done()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises((StreamStopped, UsageError)):
            await waiting
        await asyncio.sleep(0.1)
        with pytest.raises(StreamReset):
            await script.read()
        assert channel.cancelled


async def test_nothing_behind_the_last() -> None:
    async with watching() as (channel, _script):
        await channel.finish()
        await channel.finish()
        with pytest.raises(UsageError):
            await channel.send(Namespace((b"x",)))


async def test_the_request_comes_first() -> None:
    link = pair()
    channel = RequestStream(
        link.client.open(bidirectional=True),
        local=Sender.RESPONDER,
        is_client=True,
        max_updates=0,
        ids=RequestIds(is_client=True),
    )
    with pytest.raises(UsageError):
        await channel.send(RequestOk())
    link.client.close()
    await asyncio.gather(link.client.wait_closed(), link.server.wait_closed())


async def test_drain_reads_to_fin_and_checks() -> None:
    async with watching() as (channel, script):
        await script.write(encode(RequestUpdate(2)) + encode(RequestUpdate(4)))
        draining = asyncio.ensure_future(channel.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        await script.write(b"", fin=True)
        await draining
        assert not channel.cancelled
    async with watching() as (channel, script):
        await script.write(encode(Namespace((b"x",))))
        with pytest.raises(ProtocolError):
            await channel.drain()
    async with watching() as (channel, script):
        script.reset(1)
        await channel.drain()
        assert channel.cancelled


async def test_one_byte_at_a_time() -> None:
    link = pair()
    script = link.client.open(bidirectional=True)
    messages: list[Message] = [Subscribe(0, FullTrackName((b"a",), b"t")), RequestUpdate(2), RequestUpdate(4)]
    for byte in b"".join(encode(message) for message in messages):
        await script.write(bytes((byte,)))
        await asyncio.sleep(0.02)
    await script.write(b"", fin=True)
    channel = RequestStream(
        await link.server.accept(),
        local=Sender.RESPONDER,
        is_client=False,
        max_updates=0,
        ids=RequestIds(is_client=False),
    )
    found = []
    while (message := await channel.receive()) is not None:
        found.append(message)
    assert found == messages
    link.client.close()
    await asyncio.gather(link.client.wait_closed(), link.server.wait_closed())


def test_what_a_request_is_about_in_a_log() -> None:
    """As the text form of moqt 2.3, in which nothing of a peer's is left as it came."""
    hostile = (b"a\n", b"\x1b[2J")
    assert subject_of(Subscribe(0, FullTrackName(hostile, b"t"))) == "a.0a-.1b.5b2J--t"
    assert subject_of(SubscribeNamespace(0, hostile)) == "a.0a-.1b.5b2J"
