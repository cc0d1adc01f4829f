"""Bytes of a hostile peer, and how a session may take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moqt.authorization import Policy
from moqt.errors import (
    SessionClosed,
    SessionCode,
)
from moqt.filters import GroupOrder, Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.link import pair
from moqt.session import Session
from moqt.subscribing import FetchStream, Subscription
from moqt.wire import (
    Fetch,
    FetchOk,
    ObjectStatus,
    Parameters,
    RequestError,
    SubgroupEncoder,
    SubgroupHeader,
    Subscribe,
    SubscribeOk,
    encode_vi64,
)
from tests.moqt.ends import NAME, NAMESPACE, Peer, Talk, hostile

V = SessionCode.PROTOCOL_VIOLATION
TOP = 2**64 - 1
both_roles = pytest.mark.parametrize("peer_dials", [True, False], ids=["at-server", "at-client"])


def prefixed(data: bytes) -> bytes:
    return encode_vi64(len(data)) + data


def framed(kind: int, body: bytes) -> bytes:
    """A control message by hand."""
    return encode_vi64(kind) + len(body).to_bytes(2) + body


def names(fields: tuple[bytes, ...] = NAMESPACE, name: bytes = b"k0") -> bytes:
    return encode_vi64(len(fields)) + b"".join(map(prefixed, fields)) + prefixed(name)


def subscribe(request_id: int, parameters: str, *, count: int = 1) -> bytes:
    """A SUBSCRIBE with parameters in hex."""
    body = encode_vi64(request_id) + names() + encode_vi64(count) + bytes.fromhex(parameters)
    return framed(0x03, body)


async def check_closed(session: Session, peer: Peer, code: SessionCode) -> None:
    """The session has closed the connection with `code`; its own users are told so."""
    closed = await peer.closed()
    assert (closed.application, closed.remote) == (True, True)
    assert closed.code == code, closed.reason
    assert closed.reason
    error = await session.wait_closed()
    assert isinstance(error, SessionClosed)
    assert (error.code, error.remote) == (code, False)


async def check_lives(peer: Peer) -> None:
    await asyncio.sleep(0.3)
    await peer.alive()


async def check_refused(talk: Talk, code: int) -> RequestError:
    """The request got a REQUEST_ERROR with `code`, and FIN."""
    async with asyncio.timeout(1):
        answer = await talk.next()
        assert isinstance(answer, RequestError)
        assert answer.code == code, answer.reason
        assert await talk.next() is None
    return answer


@asynccontextmanager
async def subscribed(
    *, peer_dials: bool = True, limits: Limits | None = None, **options: Any
) -> AsyncIterator[tuple[Session, Peer, Subscription, Talk]]:
    """A session that has subscribed to NAME at the raw peer, under alias 1."""
    async with hostile(peer_dials=peer_dials, limits=limits) as (session, peer):
        talk, subscription = await subscribe_at(session, peer, **options)
        yield session, peer, subscription, talk
        await subscription.close()


async def subscribe_at(
    session: Session,
    peer: Peer,
    *,
    track: FullTrackName = NAME,
    alias: int = 1,
    largest: Location | None = None,
    properties: tuple[tuple[int, int | bytes], ...] = (),
    **options: Any,
) -> tuple[Talk, Subscription]:
    asking = asyncio.ensure_future(session.subscribe(track, **options))
    talk, request = await peer.request()
    assert isinstance(request, Subscribe)
    await talk.say(SubscribeOk(alias, Parameters(largest=largest), properties))
    return talk, await asking


@asynccontextmanager
async def fetching(
    order: GroupOrder = GroupOrder.ASCENDING,
) -> AsyncIterator[tuple[Session, Peer, FetchStream, int]]:
    """A session that fetches at the raw peer; and the Request ID."""
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(
            session.fetch(NAME, filter=LocationFilter.absolute_start(0, 0), order=order)
        )
        talk, request = await peer.request()
        assert isinstance(request, Fetch)
        await talk.say(FetchOk(False, Location(TOP, TOP)))
        fetch = await asking
        yield session, peer, fetch, request.request_id
        await fetch.close()


def subgroup(
    *objects: tuple[int, bytes],
    alias: int = 1,
    group: int = 0,
    properties: bytes = b"",
    status: tuple[int, ObjectStatus] | None = None,
    **header: Any,
) -> bytes:
    """A subgroup stream."""
    head = SubgroupHeader(alias, group, **{"priority": 128, "has_properties": bool(properties), **header})
    encoder = SubgroupEncoder(head)
    data = encoder.header()
    for number, content in objects:
        data += encoder.object(number, len(content), properties=properties) + content
    if status is not None:
        data += encoder.object(status[0], 0, status=status[1])
    return data


@asynccontextmanager
async def unset(
    *, peer_dials: bool = True, policy: Policy | None = None, limits: Limits | None = None
) -> AsyncIterator[tuple[asyncio.Future[None], Session, Peer]]:
    """A session that waits for the peer's SETUP."""
    link = pair()
    ours, theirs = (link.server, link.client) if peer_dials else (link.client, link.server)
    session, peer = Session(ours, policy=policy, limits=limits), Peer(theirs)
    starting = asyncio.ensure_future(session.start())
    try:
        yield starting, session, peer
    finally:
        await asyncio.gather(starting, return_exceptions=True)
        await session.close()
        peer.connection.close()
        await peer.connection.wait_closed()


async def make_request(session: Session, kind: str) -> object:
    match kind:
        case "subscribe":
            return await session.subscribe(NAME)
        case "fetch":
            return await session.fetch(NAME, filter=LocationFilter.absolute_start(0, 5))
        case "track_status":
            return await session.track_status(NAME)
        case "subscribe_namespace":
            return await session.subscribe_namespace(NAMESPACE)
        case _:
            return await session.publish_namespace(NAMESPACE)
