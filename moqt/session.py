"""One MOQT session over one QUIC connection: SETUP, streams, requests, limits and the end (moqt 3).

A session publishes and subscribes alike, whichever side dialled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from moqt.answering import Answering
from moqt.asking import OwnRequest, ask, in_time, session_error
from moqt.auth import Gate
from moqt.authorization import AllowAll, Policy
from moqt.errors import (
    DeadlineExceeded,
    DoneCode,
    MoqtError,
    ProtocolError,
    SessionCode,
    StreamReset,
    UsageError,
)
from moqt.filters import FilterType, GroupOrder, LocationFilter, RangeFilter
from moqt.incoming import Incoming
from moqt.limits import Limits
from moqt.names import FullTrackName, TrackNamespace, check_namespace, printable
from moqt.namespaces import Announcement, NamespaceWatch, announce
from moqt.partial import Partial
from moqt.publishing import Publishing
from moqt.quic.api import Connection, ConnectionClosed, Stream
from moqt.requests import RequestIds, RequestStream
from moqt.scheduler import Scheduler
from moqt.stats import Stats
from moqt.tasks import Tasks
from moqt.tracks import Tracks
from moqt.uri import MoqtUri, Served
from moqt.wire import (
    Fetch,
    FetchOk,
    Goaway,
    Message,
    MessageDecoder,
    ObjectDatagram,
    Parameters,
    PublishNamespace,
    RequestOk,
    Setup,
    SetupOptions,
    StreamKind,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
    decode_datagram,
    encode,
    stream_kind,
)

if TYPE_CHECKING:
    from moqt.offers import TracksWatch
    from moqt.reception import Sink
    from moqt.subscribing import FetchStream, Fill, Subscription, TrackStatusResult

__all__ = ["IMPLEMENTATION", "Session"]

logger = logging.getLogger(__name__)

IMPLEMENTATION = "kvcs-moqt/0"


class Session:
    """One MOQT session. `async with Session(connection)` exchanges SETUP, and closes the session at the end.

    `tracks` is what the peer may ask for; with `announce`, each of its namespaces is told to the peer by
    PUBLISH_NAMESPACE, which a publisher does towards a relay (default: if we dialled and there are any
    `tracks`). `tokens` go with SETUP and with every request (moqt 2.7); `policy` says what the peer may do
    (default: everything). `uri` is what was dialled, `served` what a server serves.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        tracks: Tracks | None = None,
        announce: bool | None = None,
        tokens: Sequence[Token] = (),
        policy: Policy | None = None,
        limits: Limits | None = None,
        stats: Stats | None = None,
        uri: MoqtUri | None = None,
        served: Served | None = None,
    ) -> None:
        self.connection = connection
        self.tracks = Tracks() if tracks is None else tracks
        self.announce = connection.is_client and tracks is not None if announce is None else announce
        self.limits = Limits() if limits is None else limits
        self.stats = Stats() if stats is None else stats
        self.uri = uri
        self.served = Served() if served is None else served
        self.peer_setup = SetupOptions()
        self.peer_namespaces: dict[TrackNamespace, int] = {}
        """What the peer has announced, and how often."""
        self.peer_goaway: Goaway | None = None
        self.goaway_received = asyncio.Event()
        self.on_announced: Callable[[TrackNamespace, Exception | None], None] | None = None
        """Called when the peer accepts a namespace of `tracks`, and, with an error, when it does not take it
        (any more).
        """
        self.renewed = asyncio.Event()
        """Set by the next `renew`."""
        self.ids = RequestIds(is_client=connection.is_client)
        self.scheduler = Scheduler(connection)
        self.partial = Partial(self.limits.max_partial)
        self.publishing = Publishing(self)
        self.incoming = Incoming(self)
        self.tokens = tuple(tokens)
        self.gate = Gate(policy or AllowAll(), connection, self.limits.max_auth_token_cache_size)
        self.answering = Answering(self)
        self.ready = asyncio.Event()
        """Set when the peer's SETUP is accepted, and at the end."""
        self._closed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._tasks = Tasks(connection.id, self.abort)
        self._followers: set[asyncio.Task[None]] = set()
        self._requests: set[OwnRequest] = set()
        self._control: Stream | None = None
        self._peer_control = False
        connection.on_datagram = self._on_datagram

    # The life of the session.

    async def __aenter__(self) -> Session:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Exchange SETUP. Raises DeadlineExceeded, SessionClosed, ConnectionLost."""
        self.stats.begin(self)
        accepting = self.spawn(self._accept(), "accept", reads=True)
        self._watcher = asyncio.create_task(self._watch(accepting), name=f"{self.connection.id} end")
        try:
            try:
                await in_time(self._set_up(), "the exchange of SETUP", self.limits.setup_deadline)
            except DeadlineExceeded:
                self.abort(SessionCode.CONTROL_MESSAGE_TIMEOUT, "SETUP was not exchanged in time")
                raise
        except BaseException:
            await self.close()
            raise
        if self.announce:
            self.spawn(announce(self), "announce")

    async def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close the session at once. Idempotent. To end subscriptions in order first, call `finish`."""
        self.connection.close(code, reason)
        current: asyncio.Task[None] | None = asyncio.current_task()
        if current is not None:  # A task of the session that closes it goes on; it ends by itself.
            self._tasks.discard(current)
        closed = await self.connection.wait_closed()
        if self._watcher is None:
            self._end()
        await self._closed.wait()
        tasks = self._tasks.cancel()
        if self._watcher is not None:
            tasks.append(self._watcher)
        await asyncio.gather(*tasks, return_exceptions=True)
        for made in list(self._requests):
            made.fail(session_error(closed))

    async def finish(self, code: DoneCode, *, deadline: float) -> bool:
        """End all that we serve with PUBLISH_DONE `code`, and wait until each subscriber has seen all of it,
        `deadline` seconds at most; whether it has.
        """
        try:
            async with asyncio.timeout(deadline):
                await self.publishing.finish(code)
                await self.scheduler.flush()
                await self.connection.ping()
        except (TimeoutError, ConnectionClosed):
            logger.info("%s: the peer did not take all that was sent before the end", self.connection.id)
            return False
        return True

    async def wait_closed(self) -> MoqtError:
        """Wait for the end of the session and return what ended it: SessionClosed or ConnectionLost."""
        await self._closed.wait()
        error = self.error
        assert error is not None
        return error

    @property
    def error(self) -> MoqtError | None:
        """What ended the session; None while it lives."""
        closed = self.connection.closed
        return None if closed is None else session_error(closed)

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self.connection.closed is not None

    @property
    def buffered(self) -> int:
        """Bytes that we hold for this session: to be sent, of Objects that are not whole, and unread."""
        return self.scheduler.weight + self.partial.bytes + self.connection.held

    @property
    def serving(self) -> int:
        """How many requests of the peer are open."""
        return self.answering.serving

    async def goaway(self, uri: str = "", *, timeout: float = 0.0) -> None:
        """Ask the peer to leave (moqt 16); after `timeout` seconds, if not 0, the session is closed with
        GOAWAY_TIMEOUT if requests are left. Raises UsageError, SessionClosed, ConnectionLost.
        """
        if self._control is None or self.answering.leaving:
            sent = self.answering.leaving
            raise UsageError("GOAWAY was sent already" if sent else "the session was not started")
        if uri and self.connection.is_client:
            raise UsageError("a client can't name a URI in GOAWAY")
        self.answering.leaving = True
        try:
            await self._control.write(encode(Goaway(uri, int(timeout * 1000))))
        except ConnectionClosed as closed:
            raise session_error(closed) from None
        if timeout:
            self.spawn(self._leave_after(timeout), "GOAWAY")

    def abort(self, code: int, reason: str) -> None:
        """Close because of what the peer did, or failed to do."""
        if self.connection.closed is None:
            logger.warning(
                "%s: closing the session with code %#x: %s", self.connection.id, code, printable(reason)
            )
            self.connection.close(code, reason)

    # Our requests.

    async def subscribe(
        self,
        track: FullTrackName,
        *,
        filter: LocationFilter | None = None,
        fill: Fill | None = None,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int = 128,
        order: GroupOrder | None = None,
        forward: bool = True,
        object_timeout: float | None = None,
        subgroup_timeout: float | None = None,
        sink: Sink | None = None,
        deadline: float | None = None,
    ) -> Subscription:
        """Subscribe to `track`; without a `filter`, to what is published from now on (Next Object). Objects
        go into `sink` as they come, if one is given, and not into the queue. What is older than the timeouts,
        in seconds, before it leaves need not be sent (moqt 12.7).

        Raises RequestRejected, StreamReset (the peer has cancelled instead of answering), DeadlineExceeded
        (after `deadline` seconds, `limits.reply_deadline` if None), SessionClosed, ConnectionLost,
        MalformedTrack, UsageError for filters that the peer has not allowed, and for a second subscription to
        a Track whose publisher gives both the same alias.
        """
        from moqt.subscribing import Subscription

        location_filter = filter or LocationFilter.next_object()
        self.incoming.check_ranges(range_filters + (fill.range_filters if fill else ()))
        parameters = Parameters(
            tokens=self.tokens,
            forward=None if forward else False,
            subscriber_priority=None if priority == 128 else priority,
            location_filter=location_filter,
            group_order=order,
            range_filters=range_filters,
            fill=fill.parameters() if fill else None,
            object_delivery_timeout=None if object_timeout is None else int(object_timeout * 1000),
            subgroup_delivery_timeout=None if subgroup_timeout is None else int(subgroup_timeout * 1000),
        )
        request_id = -1

        def build(number: int) -> Subscribe:
            nonlocal request_id
            request_id = number
            return Subscribe(number, track, parameters)

        def make(stream: RequestStream) -> Subscription:
            filtered = bool(range_filters) or location_filter.end is not None
            made = Subscription(self, stream, track, location_filter, filtered=filtered, forward=forward)
            made.sink = sink
            if fill is not None:
                self.incoming.expect(request_id, made, fill.order, wait=True)
            return made

        subscription, reply = await ask(self, build, make, deadline)
        assert isinstance(reply, SubscribeOk)
        try:
            subscription.accepted(reply, request_id, fill)
        except ProtocolError as error:
            self.abort(error.code, error.reason)
            raise
        self.follow(subscription)
        return subscription

    async def fetch(
        self,
        track: FullTrackName,
        *,
        filter: LocationFilter,
        order: GroupOrder = GroupOrder.ASCENDING,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int = 128,
        sink: Sink | None = None,
        deadline: float | None = None,
    ) -> FetchStream:
        """Fetch the Objects of an absolute range. Raises as `subscribe` does."""
        from moqt.subscribing import FetchStream

        if filter.type in (FilterType.RELATIVE_START, FilterType.NEXT_OBJECT):  # moqt 25 #6
            raise UsageError("a fetch needs an absolute range: the responder's Largest Object may be old")
        self.incoming.check_ranges(range_filters)
        parameters = Parameters(
            tokens=self.tokens,
            subscriber_priority=None if priority == 128 else priority,
            location_filter=filter,
            group_order=order,
            range_filters=range_filters,
        )

        def make(stream: RequestStream) -> FetchStream:
            fetch = FetchStream(self, stream, track, filter)
            fetch.sink = sink
            assert stream.request is not None
            self.incoming.expect(stream.request.request_id, fetch, order, wait=False)
            return fetch

        fetch, reply = await ask(self, lambda number: Fetch(number, track, parameters), make, deadline)
        assert isinstance(reply, FetchOk)
        try:
            fetch.accepted(reply)
        except ProtocolError as error:
            self.abort(error.code, error.reason)
            raise
        self.follow(fetch)
        return fetch

    async def subscribe_namespace(
        self, prefix: TrackNamespace, *, deadline: float | None = None
    ) -> NamespaceWatch:
        """Watch the namespaces under `prefix`. Raises as `subscribe` does."""
        check_namespace(prefix)
        watch, _ = await ask(
            self,
            lambda number: SubscribeNamespace(number, prefix, Parameters(tokens=self.tokens)),
            lambda stream: NamespaceWatch(self, stream, prefix),
            deadline,
        )
        self.follow(watch)
        return watch

    async def publish_namespace(
        self, namespace: TrackNamespace, *, deadline: float | None = None
    ) -> Announcement:
        """Tell the peer that Tracks under `namespace` can be asked of us (moqt 11). Raises as `subscribe`
        does.
        """
        check_namespace(namespace)
        announcement, _ = await ask(
            self,
            lambda number: PublishNamespace(number, namespace, Parameters(tokens=self.tokens)),
            lambda stream: Announcement(self, stream, namespace),
            deadline,
        )
        self.follow(announcement)
        return announcement

    async def subscribe_tracks(
        self,
        prefix: TrackNamespace,
        *,
        forward: bool = True,
        range_filters: tuple[RangeFilter, ...] = (),
        deadline: float | None = None,
    ) -> TracksWatch:
        """Have the peer publish all its Tracks under `prefix`, now and later; they come to `Tracks.published`
        of our `tracks`. Raises as `subscribe` does.
        """
        from moqt.offers import TracksWatch

        check_namespace(prefix)
        self.incoming.check_ranges(range_filters)
        parameters = Parameters(
            tokens=self.tokens, forward=None if forward else False, range_filters=range_filters
        )
        watch, _ = await ask(
            self,
            lambda number: SubscribeTracks(number, prefix, parameters),
            lambda stream: TracksWatch(self, stream, prefix),
            deadline,
        )
        self.follow(watch)
        return watch

    async def track_status(self, track: FullTrackName, *, deadline: float | None = None) -> TrackStatusResult:
        """Ask for the Largest Object and the properties of `track`. Raises as `subscribe` does."""
        from moqt.subscribing import TrackStatusResult

        made, reply = await ask(
            self,
            lambda number: TrackStatus(number, track, Parameters(tokens=self.tokens)),
            lambda stream: OwnRequest(self, stream),
            deadline,
            fin=True,
        )
        self.forget(made)
        assert isinstance(reply, RequestOk)
        return TrackStatusResult(reply.parameters.largest, reply.properties)

    async def renew(self, tokens: Sequence[Token]) -> None:
        """Use `tokens` from now on, and for all requests of ours that go on (moqt 5.3). One whose tokens are
        refused ends, and tells so.
        """
        self.tokens = tuple(tokens)
        renewed, self.renewed = self.renewed, asyncio.Event()
        renewed.set()
        await asyncio.gather(*(made.renew(self.tokens) for made in self._requests))

    # What the rest of moqt needs of a session.

    def spawn(
        self, coroutine: Coroutine[Any, Any, None], what: str, *, reads: bool = False
    ) -> asyncio.Task[None]:
        """Run `coroutine` until the session ends, or, if it `reads` what the peer sends, until all that had
        come is read. What goes wrong in it ends the session if it has to.
        """
        return self._tasks.spawn(coroutine, what, reads=reads)

    def keep(self, made: OwnRequest) -> None:
        """A request of ours has been made."""
        self._requests.add(made)

    def forget(self, made: OwnRequest) -> None:
        """A request of ours is over."""
        self._requests.discard(made)
        self.incoming.forget(made)

    # Inside.

    async def _set_up(self) -> None:
        try:
            self._control = await self.connection.open_when_possible(bidirectional=False)
            options = SetupOptions(
                path=self.uri.path_option if self.uri else None,
                authority=self.uri.authority if self.uri else None,
                tokens=self.tokens,
                max_auth_token_cache_size=self.limits.max_auth_token_cache_size,
                max_filter_ranges=self.limits.max_filter_ranges,
                implementation=IMPLEMENTATION,
                max_request_updates=self.limits.max_request_updates,
            )
            await self._control.write(encode(Setup(options)))
        except ConnectionClosed as closed:
            raise session_error(closed) from None
        await self.ready.wait()
        if self.error is not None:
            raise self.error

    def follow(self, made: OwnRequest) -> asyncio.Task[None]:
        """Read what the peer says of a request to its end, also when the connection has ended."""
        task = self.spawn(self._follow_to_end(made), type(made).__name__, reads=True)
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)
        return task

    async def _follow_to_end(self, made: OwnRequest) -> None:
        try:
            await made.follow()
        except ConnectionClosed as closed:
            await self.incoming.settled()
            made.lost(session_error(closed))

    async def _watch(self, accepting: asyncio.Task[None]) -> None:
        closed = await self.connection.wait_closed()
        self.scheduler.stop(closed)
        # What had come before the end is still read.
        await asyncio.wait((accepting,))
        self._end()
        await self.incoming.settled()
        if self._followers:
            await asyncio.wait(self._followers)
        for made in list(self._requests):
            made.lost(session_error(closed))

    def _end(self) -> None:
        """The connection has ended, and all its streams are accepted."""
        self.stats.end(self)
        self.incoming.end()
        self._tasks.cancel(readers=False)
        self.ready.set()
        self._closed.set()

    async def _accept(self) -> None:
        while True:
            stream = await self.connection.accept()
            if stream.bidirectional:
                self.spawn(self.answering.serve(stream), "request")
            else:
                self.incoming.arrived(self.spawn(self._read_uni(stream), "stream", reads=True))

    async def _read_uni(self, stream: Stream) -> None:
        data = b""
        try:
            while (kind := stream_kind(data)) is None:
                more = await stream.read()
                if not more:
                    if data:
                        raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "a stream ended inside its type")
                    return
                data += more
        except StreamReset as reset:
            self.incoming.nameless(reset.code)
            return
        if kind is StreamKind.CONTROL:
            self.incoming.identified()
            await self._read_control(stream, data)
        else:
            await self.incoming.on_stream(stream, data)

    async def _read_control(self, stream: Stream, data: bytes) -> None:
        if self._peer_control:
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "a second control stream")
        self._peer_control = True
        decoder = MessageDecoder(control=True)
        try:
            while data:
                for message in decoder.feed(data):
                    await self._on_control(message)
                data = await stream.read()
        except StreamReset:
            pass
        # moqt 20 #4
        raise ProtocolError(
            SessionCode.PROTOCOL_VIOLATION, "the control stream was closed while the session runs"
        )

    async def _on_control(self, message: Message) -> None:
        if isinstance(message, Setup):
            await self._on_setup(message.options)
            return
        assert isinstance(message, Goaway)
        if message.uri and not self.connection.is_client:  # moqt 20 #13; the decoder refuses a second one.
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "a GOAWAY with a URI from a client")
        logger.info("%s: the peer asks us to leave (GOAWAY)", self.connection.id)
        self.peer_goaway = message
        self.goaway_received.set()

    async def _on_setup(self, options: SetupOptions) -> None:
        if self.connection.is_client:  # moqt 20 #31
            if options.path is not None:
                raise ProtocolError(SessionCode.INVALID_PATH, "a server can't send PATH")
            if options.authority is not None:
                raise ProtocolError(SessionCode.INVALID_AUTHORITY, "a server can't send AUTHORITY")
        else:
            self.served.check(options.authority, options.path)
        self.peer_setup = options
        await self.gate.admit(options.tokens)
        self.ready.set()

    def _on_datagram(self, data: bytes) -> None:
        try:
            datagram = decode_datagram(data)
            if isinstance(datagram, ObjectDatagram):
                self.incoming.on_datagram(datagram)
        except ProtocolError as error:
            self.abort(error.code, error.reason)

    async def _leave_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.serving or self._requests:
            self.abort(SessionCode.GOAWAY_TIMEOUT, "requests were left after GOAWAY")
