"""PUBLISH, from both sides: Tracks that a publisher offers, unasked or as SUBSCRIBE_TRACKS asks (moqt 11)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from moqt.asking import OwnRequest, rejected, session_error
from moqt.authorization import AccessRequest, Action, AllowAll, Allowed, Authority, Denied, TokenPair
from moqt.delivery import Delivery
from moqt.errors import (
    MalformedTrack,
    RequestCode,
    RequestRefused,
    RequestRejected,
    UsageError,
)
from moqt.filters import LocationFilter, RangeFilter, RangeKind, check_range_filters, matches_track
from moqt.names import TrackNamespace, is_prefix
from moqt.namespaces import claim
from moqt.quic.api import ConnectionClosed, NoStreamCredit, Stream
from moqt.reception import Sink
from moqt.requests import RequestStream
from moqt.states import Sender
from moqt.subscribing import Subscription
from moqt.track import Track
from moqt.wire import (
    Message,
    Parameters,
    Publish,
    PublishSkipped,
    RequestError,
    RequestOk,
    RequestUpdate,
    SubscribeTracks,
    check_track_properties,
    unknown_mandatory_properties,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["Offer", "TracksWatch", "publish", "serve_tracks", "take_offer"]

logger = logging.getLogger(__name__)


class Offer(Subscription):
    """A subscription that the peer has opened with PUBLISH: `accept` it, and then it is like one of ours."""

    def __init__(
        self, session: Session, stream: RequestStream, message: Publish, authority: Authority
    ) -> None:
        parameters = message.parameters
        location_filter = parameters.location_filter or LocationFilter.none()
        super().__init__(
            session,
            stream,
            message.track,
            location_filter,
            filtered=location_filter.end is not None,
            forward=parameters.forward is not False,
        )
        self.alias = message.track_alias
        self.largest = parameters.largest
        self.properties = message.properties
        self.following: asyncio.Task[None] | None = None
        self._authority = authority
        self._answering = asyncio.Lock()

    async def accept(self, *, sink: Sink | None = None) -> None:
        """Send PUBLISH_OK. Objects go into `sink` as they come, if one is given, and not into the queue.

        Raises RequestRefused when there is a subscription to the Track under the same alias already.
        """
        try:
            self.open()
        except UsageError as error:
            raise RequestRefused(RequestCode.INTERNAL_ERROR, str(error)) from None
        self.sink = sink
        self.session.keep(self)
        await self.request.send(RequestOk(Parameters(expires=self._authority.expires)))
        self.following = self.session.follow(self)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, RequestUpdate):  # The publisher's own: it can bring a token (moqt 4.1).
            self.session.spawn(self._answer_update(message.parameters), "REQUEST_UPDATE")
        else:
            super()._on_message(message)

    async def _answer_update(self, parameters: Parameters) -> None:
        tokens: list[TokenPair] = []
        refused: RequestRefused | None = None
        try:
            tokens = self.session.gate.tokens_of(parameters)
        except RequestRefused as refusal:
            refused = refusal
        async with self._answering:  # In order: an answer does not say which update it is for.
            try:
                if refused is not None:
                    raise refused
                await self._authority.update(tokens)
                reply: Message = RequestOk(Parameters(expires=self._authority.expires))
            except RequestRefused as refusal:
                reply = RequestError(refusal.code, 0, refusal.reason, refusal.redirect)
            if not self.request.over:
                await self.request.send(reply)


async def take_offer(session: Session, stream: RequestStream, message: Publish, authority: Authority) -> None:
    """Hand a PUBLISH to whoever wants it, until it is over. Raises RequestRefused."""
    if unknown_mandatory_properties(message.properties):  # moqt 13.1
        raise RequestRefused(RequestCode.UNSUPPORTED_EXTENSION, "the Track has an unknown mandatory property")
    try:  # moqt 20.1: before anybody takes them over.
        check_track_properties(message.properties)
    except MalformedTrack as error:
        raise RequestRefused(RequestCode.MALFORMED_TRACK, str(error)) from None
    offer = Offer(session, stream, message, authority)

    def revoke(denied: Denied) -> None:
        stream.cancel(denied.reset_code)
        offer.fail(denied.refusal)

    authority.when_lost(revoke)
    try:
        await session.tracks.published(session, offer)
    except asyncio.CancelledError:
        raise  # The session has ended. What had come may still be read.
    except BaseException:
        await _end(offer)
        raise
    await _end(offer)


async def _end(offer: Offer) -> None:
    """Nobody wants more of it; let the publisher's FIN come."""
    if offer.following is not None:
        await offer.close()
        await asyncio.wait((offer.following,), timeout=offer.session.limits.linger)
        offer.following.cancel()
        await asyncio.wait((offer.following,))  # A stream has one reader at a time.


class TracksWatch(OwnRequest):
    """A SUBSCRIBE_TRACKS: the peer sends PUBLISH for each Track under `prefix`, which comes to
    `Tracks.published` of the session. `skipped` are the Tracks for which it could not.
    """

    def __init__(self, session: Session, stream: RequestStream, prefix: TrackNamespace) -> None:
        super().__init__(session, stream)
        self.prefix = prefix
        self.skipped: list[tuple[TrackNamespace, bytes]] = []
        self._ended = asyncio.Event()

    async def close(self) -> None:
        """No more Tracks; what was published goes on. Idempotent."""
        self.session.forget(self)
        self.request.cancel()

    async def wait_ended(self) -> Exception | None:
        """Wait until it breaks, and return why."""
        await self._ended.wait()
        return self._error

    def fail(self, error: Exception) -> None:
        """It has ended by `error`."""
        super().fail(error)
        self._ended.set()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, PublishSkipped) and len(self.skipped) < self.session.limits.max_namespaces:
            self.skipped.append(((*self.prefix, *message.suffix), message.name))

    def _on_fin(self) -> None:
        self._ended.set()


async def serve_tracks(
    session: Session, stream: RequestStream, message: SubscribeTracks, authority: Authority
) -> None:
    """Serve a SUBSCRIBE_TRACKS until it ends. Raises RequestRefused before the reply."""
    await _TracksFeed(session, stream, message, authority).serve()


class _TracksFeed:
    """PUBLISH for each Track under the prefix of one SUBSCRIBE_TRACKS, now and later."""

    def __init__(
        self, session: Session, stream: RequestStream, message: SubscribeTracks, authority: Authority
    ) -> None:
        self._session = session
        self._stream = stream
        self._prefix = message.prefix
        self._parameters = message.parameters
        self._authority = authority

    async def serve(self) -> None:
        session, over = self._session, asyncio.Event()
        limit = session.limits.max_filter_ranges
        check_range_filters(self._parameters.range_filters, limit=limit)
        claim(session, session.publishing.track_prefixes, self._prefix)
        tracks = session.tracks
        tracks.watch_tracks(self._appeared)
        tracks.wanted_tracks(session, self._prefix, True)

        def revoke(denied: Denied) -> None:
            self._stream.cancel(denied.reset_code)
            over.set()

        self._authority.when_lost(revoke)
        try:
            await self._stream.send(RequestOk(Parameters(expires=self._authority.expires)))
            for track in tracks.offers():
                self._appeared(track)
            await session.publishing.follow(self._stream, self._authority, over, self._update, fail=over.set)
        finally:
            tracks.unwatch_tracks(self._appeared)
            tracks.wanted_tracks(session, self._prefix, False)
            session.publishing.track_prefixes.remove(self._prefix)

    async def _update(self, message: RequestUpdate) -> None:
        new = message.parameters
        check_range_filters(new.range_filters, limit=self._session.limits.max_filter_ranges)
        if new.prefix is not None and new.prefix != self._prefix:
            taken = self._session.publishing.track_prefixes
            claim(self._session, taken, new.prefix, instead_of=self._prefix)
            self._session.tracks.wanted_tracks(self._session, new.prefix, True)
            self._session.tracks.wanted_tracks(self._session, self._prefix, False)
            self._prefix = new.prefix
        kinds = {known.kind for known in new.range_filters}
        self._parameters = Parameters(
            forward=self._parameters.forward if new.forward is None else new.forward,
            group_order=self._parameters.group_order,
            include_properties=self._parameters.include_properties,
            range_filters=(
                *(known for known in self._parameters.range_filters if known.kind not in kinds),
                *(known for known in new.range_filters if not known.removes),
            ),
        )
        await self._stream.send(RequestOk(Parameters(expires=self._authority.expires)))

    def _appeared(self, track: Track) -> None:
        namespace = track.name.namespace
        if (
            is_prefix(self._prefix, namespace)
            and matches_track(self._parameters.range_filters, track.properties)
            and self._session.tracks.may_offer(self._session, track)
        ):
            self._session.spawn(self._publish(track), "PUBLISH")

    async def _publish(self, track: Track) -> None:
        try:
            stream = self._session.connection.open(bidirectional=True)
        except NoStreamCredit:  # moqt 11: it is not tried again.
            if not self._stream.over:
                suffix = track.name.namespace[len(self._prefix) :]
                await self._stream.send(PublishSkipped(suffix, track.name.name))
            return
        published = _Published(self._session, stream, track, self._parameters)
        # moqt 11: it may go on when the SUBSCRIBE_TRACKS is over, but not without the right.
        authority = self._authority.fork()
        authority.when_lost(published.delivery.revoke)
        watching = self._session.spawn(authority.watch(), "authorization")
        try:
            await published.serve(authority)
        except RequestRejected as rejection:
            logger.info("%s: %s", self._session.connection.id, rejection)
        finally:
            watching.cancel()


async def publish(session: Session, track: Track, *, forward: bool = True) -> None:
    """Offer a Track by PUBLISH, unasked, and serve the subscription until it is over. Without `forward` it is
    paused until the subscriber resumes it. Raises RequestRejected, SessionClosed, ConnectionLost.
    """
    request = AccessRequest(action=Action.SUBSCRIBE, namespace=track.name.namespace, name=track.name.name)
    authority = Authority(AllowAll(), request, Allowed())
    try:
        stream = await session.connection.open_when_possible(bidirectional=True)
        asked = Parameters(forward=None if forward else False)
        await _Published(session, stream, track, asked).serve(authority)
    except ConnectionClosed as closed:
        raise session_error(closed) from None


class _Published:
    """A PUBLISH of ours. `asked` are the parameters of the SUBSCRIBE_TRACKS for which it is."""

    def __init__(self, session: Session, stream: Stream, track: Track, asked: Parameters) -> None:
        offered = Parameters(
            tokens=session.tokens,  # Ours, never one of SUBSCRIBE_TRACKS (moqt 5.2).
            largest=track.largest,
            forward=asked.forward,
            group_order=asked.group_order,
        )
        alias = session.publishing.new_alias()
        properties = () if asked.include_properties is False else track.properties
        self._session = session
        self._stream = RequestStream(
            stream,
            local=Sender.REQUESTER,
            is_client=session.connection.is_client,
            max_updates=session.limits.max_request_updates,
            ids=session.ids,
            request=Publish(session.ids.next(), track.name, alias, offered, properties),
        )
        initial = Parameters(
            forward=asked.forward,
            group_order=asked.group_order,
            range_filters=_selecting(asked.range_filters, track),
        )
        self.delivery = Delivery(session, self._stream, initial, track, alias)
        # From the Largest Object that PUBLISH tells on, before PUBLISH_OK has come (moqt 4.2).
        track.watch(self.delivery)

    async def serve(self, authority: Authority) -> None:
        """Raises RequestRejected, and what a stream raises."""
        renewing = self._session.spawn(self._renew(), "tokens")
        try:
            await self._stream.send_request()
            reply = await self._stream.receive()
            if isinstance(reply, RequestOk):
                await self._session.publishing.serve_delivery(self._stream, self.delivery, authority)
            elif isinstance(reply, RequestError):
                await self._stream.finish()
                raise rejected(reply, Action.PUBLISH)
            else:  # FIN or GOAWAY: the peer does not want it.
                self._stream.cancel()
        finally:
            renewing.cancel()
            self.delivery.cancel()

    async def _renew(self) -> None:
        """Give the peer each further token that we have (moqt 5.3)."""
        while True:
            await self._session.renewed.wait()
            if self._stream.over:
                return
            parameters = Parameters(tokens=self._session.tokens)
            await self._stream.send(RequestUpdate(self._session.ids.next(), parameters))


def _selecting(filters: tuple[RangeFilter, ...], track: Track) -> tuple[RangeFilter, ...]:
    """The filters for Objects of the SetIDs whose filters for Track Properties let `track` pass (moqt 8)."""
    return tuple(
        known
        for known in filters
        if known.kind is not RangeKind.TRACK_PROPERTY
        and matches_track((other for other in filters if other.set_id == known.set_id), track.properties)
    )
