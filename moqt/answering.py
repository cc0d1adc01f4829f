"""Answers the requests of one session's peer: who may ask, how much, and what serves it (moqt 3.4, 21)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from moqt.authorization import Authority
from moqt.errors import RequestCode, RequestRefused, ResetCode, StreamReset, StreamStopped
from moqt.limits import Pace
from moqt.namespaces import take_namespace
from moqt.publishing import request_error
from moqt.quic.api import Stream
from moqt.requests import RequestStream, namespace_of, subject_of
from moqt.states import Sender
from moqt.wire import (
    Fetch,
    Publish,
    PublishNamespace,
    Request,
    Subscribe,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["Answering"]

logger = logging.getLogger(__name__)

_RESERVED_NAMESPACES = (b".", b".session")


class Answering:
    """Serves the requests of the peer: `serving` are open; none are taken any more when we are `leaving`."""

    def __init__(self, session: Session) -> None:
        self.serving = 0
        self.leaving = False
        self._session = session
        limits = session.limits
        self._pace = None if limits.request_rate is None else Pace(limits.request_rate, limits.max_requests)

    async def serve(self, stream: Stream) -> None:
        """Serve the request that the peer makes on `stream`, to its end. Raises ProtocolError."""
        session = self._session
        channel = RequestStream(
            stream,
            local=Sender.RESPONDER,
            is_client=session.connection.is_client,
            max_updates=session.limits.max_request_updates,
            ids=session.ids,
        )
        self.serving += 1
        try:
            await channel.receive()
            await session.ready.wait()  # moqt 3.1: requests may come before the peer's SETUP.
            assert channel.request is not None
            kind = type(channel.request).__name__
            session.stats.requests[kind] += 1
            try:
                await self._dispatch(channel, channel.request)
            except RequestRefused as refusal:
                session.stats.refused[kind, refusal.code.name] += 1
                await channel.send(request_error(refusal, session.limits.retry_after), fin=True)
        except (StreamReset, StreamStopped):
            channel.cancel()
        finally:
            self.serving -= 1
        try:
            async with asyncio.timeout(session.limits.linger):
                await channel.drain(session.gate.heed)
        except TimeoutError:
            stream.stop(ResetCode.CANCELLED)

    async def _dispatch(self, channel: RequestStream, request: Request) -> None:
        session, limits = self._session, self._session.limits
        logger.debug("%s: %s of %s", session.connection.id, type(request).__name__, subject_of(request))
        tokens = session.gate.tokens_of(request.parameters)
        if self.leaving:
            raise RequestRefused(RequestCode.GOING_AWAY, "this endpoint is about to leave")
        if self.serving > limits.max_requests:
            raise RequestRefused(
                RequestCode.EXCESSIVE_LOAD, f"{limits.max_requests} requests are open already"
            )
        if self._pace is not None and not self._pace.take(asyncio.get_running_loop().time()):
            raise RequestRefused(
                RequestCode.EXCESSIVE_LOAD, f"more than {limits.request_rate:g} requests a second"
            )
        # security 3.2: before anything is looked up or asked upstream, so that neither the answer nor its
        # time tells those without the right whether a thing exists.
        authority = await session.gate.authority(request, tokens)
        watching = session.spawn(authority.watch(), "authorization")
        try:
            await self._handle(channel, request, authority)
        finally:
            watching.cancel()

    async def _handle(self, channel: RequestStream, request: Request, authority: Authority) -> None:
        session = self._session
        if namespace_of(request)[:1] in [(name,) for name in _RESERVED_NAMESPACES]:  # moqt 20 #35
            raise RequestRefused(RequestCode.DOES_NOT_EXIST, "nothing is here under a reserved namespace")
        match request:
            case Subscribe():
                await session.publishing.subscribe(channel, request, authority)
            case Fetch():
                await session.publishing.fetch(channel, request, authority)
            case TrackStatus():
                await session.publishing.track_status(channel, request, authority)
            case SubscribeNamespace():
                await session.publishing.subscribe_namespace(channel, request, authority)
            case PublishNamespace():
                await take_namespace(session, channel, request, authority)
            case Publish():
                from moqt.offers import take_offer

                await take_offer(session, channel, request, authority)
            case SubscribeTracks():
                from moqt.offers import serve_tracks

                await serve_tracks(session, channel, request, authority)
