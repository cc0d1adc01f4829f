"""One MOQT session over one QUIC connection: SETUP, streams, requests, limits and the end (moqt 3).

A session publishes and subscribes alike, whichever side dialled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from moqt.auth import TokenCache
from moqt.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DoneCode,
    MoqtError,
    ProtocolError,
    RequestCode,
    RequestRefused,
    RequestRejected,
    SessionClosed,
    SessionCode,
    StreamReset,
    StreamStopped,
    UsageError,
)
from moqt.filters import FilterType, GroupOrder, LocationFilter, RangeFilter, check_range_filters
from moqt.limits import Limits
from moqt.names import FullTrackName, TrackNamespace, check_namespace, printable
from moqt.publishing import Publishing, request_error
from moqt.quic.api import Connection, ConnectionClosed, Stream
from moqt.requests import RequestStream
from moqt.scheduler import Scheduler
from moqt.states import Sender
from moqt.subscribing import (
    Announcement,
    FetchStream,
    Fill,
    NamespaceWatch,
    OwnRequest,
    Subscribing,
    Subscription,
    TrackStatusResult,
    rejected,
)
from moqt.track import Tracks
from moqt.uri import MoqtUri, parse_authority, parse_path
from moqt.wire import (
    Fetch,
    FetchOk,
    Goaway,
    Message,
    MessageDecoder,
    Parameters,
    Properties,
    Publish,
    PublishNamespace,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    Setup,
    SetupOptions,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
    decode_datagram,
    encode,
    read_vi64,
)

__all__ = ["IMPLEMENTATION", "Session"]

logger = logging.getLogger(__name__)

IMPLEMENTATION = "kvcs-moqt/0"
_CONTROL_STREAM = 0x2F00
_MANDATORY_PROPERTIES = range(0x4000, 0x8000)
_RESERVED_NAMESPACES = (b".", b".session")

T = TypeVar("T")
R = TypeVar("R", bound=OwnRequest)


class Session:
    """One MOQT session. `async with Session(connection)` exchanges SETUP, and closes the session at the end.

    `tracks` is what the peer may ask for; with `announce`, each of its namespaces is told to the peer by
    PUBLISH_NAMESPACE, which a publisher does towards a relay (default: if we dialled and there are any
    `tracks`). `tokens` go with SETUP and with every request (moqt 2.7). `uri` is what was dialled.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        tracks: Tracks | None = None,
        announce: bool | None = None,
        tokens: Sequence[Token] = (),
        limits: Limits | None = None,
        uri: MoqtUri | None = None,
    ) -> None:
        self.connection = connection
        self.tracks = Tracks() if tracks is None else tracks
        self.announce = connection.is_client and tracks is not None if announce is None else announce
        self.limits = Limits() if limits is None else limits
        self.uri = uri
        self.peer_setup = SetupOptions()
        self.peer_namespaces: dict[TrackNamespace, None] = {}
        self.goaway_received = asyncio.Event()
        self.error: MoqtError | None = None
        self.scheduler = Scheduler(connection)
        self.publishing = Publishing(self)
        self.subscribing = Subscribing(self)
        self._tokens = tuple(tokens)
        self._token_cache = TokenCache(self.limits.max_auth_token_cache_size)
        self._next_request_id = 0 if connection.is_client else 1
        self._peer_ids = _PeerIds(parity=1 if connection.is_client else 0)
        self._ready = asyncio.Event()
        self._closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: set[OwnRequest] = set()
        self._serving = 0
        self._control: Stream | None = None
        self._peer_control = False
        self._leaving = False
        connection.on_datagram = self._on_datagram

    # The life of the session.

    async def __aenter__(self) -> Session:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Exchange SETUP. Raises DeadlineExceeded, SessionClosed, ConnectionLost."""
        self.spawn(self._watch_connection(), "connection")
        self.spawn(self._accept(), "accept")
        try:
            async with self._mapped():
                self._control = await self.in_time(
                    self.connection.open_when_possible(bidirectional=False),
                    "stream credit for our control stream",
                    self.limits.setup_deadline,
                )
                await self._control.write(encode(Setup(self._setup_options())))
                try:
                    await self.in_time(
                        self._ready_or_closed(), "the peer's SETUP", self.limits.setup_deadline
                    )
                except DeadlineExceeded:
                    self.abort(SessionCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP came in time")
                    raise
        except BaseException:
            await self.close()
            raise
        if self.announce:
            self.spawn(self._announce(), "PUBLISH_NAMESPACE")

    async def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close the session at once. Idempotent. To end subscriptions in order first, call `finish`."""
        self.connection.close(code, reason)
        await self.connection.wait_closed()
        await self.wait_closed()
        tasks = {task for task in self._tasks if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self, code: DoneCode, *, deadline: float) -> None:
        """End all that we serve with PUBLISH_DONE `code`, and wait until the peer has all of it, `deadline`
        seconds at most.
        """
        try:
            async with asyncio.timeout(deadline):
                await self.publishing.finish(code)
                await self.scheduler.flush()
                await self.connection.ping()
        except (TimeoutError, ConnectionClosed):
            logger.info("%s: the peer did not take all that was sent before the end", self.connection.id)

    async def wait_closed(self) -> MoqtError:
        """Wait for the end of the session and return what ended it: SessionClosed or ConnectionLost."""
        await self._closed.wait()
        assert self.error is not None
        return self.error

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self.error is not None

    async def goaway(self, uri: str = "", *, timeout: float = 0.0) -> None:
        """Ask the peer to leave (moqt 16); after `timeout` seconds, if not 0, the session is closed with
        GOAWAY_TIMEOUT.
        """
        assert self._control is not None
        if self._leaving:
            raise UsageError("GOAWAY was sent already")
        if uri and self.connection.is_client:
            raise UsageError("a client can't name a URI in GOAWAY")
        self._leaving = True
        await self._control.write(encode(Goaway(uri, int(timeout * 1000))))
        if timeout:
            self.spawn(self._leave_after(timeout), "GOAWAY")

    def abort(self, code: int, reason: str) -> None:
        """Close because of what the peer did, or failed to do."""
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
        deadline: float | None = None,
    ) -> Subscription:
        """Subscribe to `track`; without a `filter`, to what is published from now on (Next Object).

        Raises RequestRejected, DeadlineExceeded (after `deadline` seconds, `limits.reply_deadline` if None),
        SessionClosed, ConnectionLost, UsageError for filters that the peer has not allowed.
        """
        location_filter = filter or LocationFilter.next_object()
        self._check_ranges(range_filters + (fill.range_filters if fill else ()))
        parameters = Parameters(
            tokens=self._tokens,
            forward=None if forward else False,
            subscriber_priority=None if priority == 128 else priority,
            location_filter=location_filter,
            group_order=order,
            range_filters=range_filters,
            fill=fill.parameters() if fill else None,
        )

        def make(stream: RequestStream) -> Subscription:
            subscription = Subscription(self, stream, track, location_filter)
            if fill is not None and stream.request is not None:
                self.subscribing.expect_fill(stream.request.request_id, subscription, fill.order)
            return subscription

        subscription, reply = await self._request(
            lambda number: Subscribe(number, track, parameters), make, deadline
        )
        assert isinstance(reply, SubscribeOk)
        subscription.accepted(reply, fill)
        await self._check_properties(subscription, reply.properties)
        try:
            self.subscribing.register(subscription)
        except ProtocolError as error:
            self.abort(error.code, error.reason)
            raise
        self.spawn(subscription.follow(), type(subscription).__name__)
        return subscription

    async def fetch(
        self,
        track: FullTrackName,
        *,
        filter: LocationFilter,
        order: GroupOrder = GroupOrder.ASCENDING,
        range_filters: tuple[RangeFilter, ...] = (),
        priority: int = 128,
        deadline: float | None = None,
    ) -> FetchStream:
        """Fetch the Objects of an absolute range. Raises as `subscribe` does."""
        if filter.type in (FilterType.RELATIVE_START, FilterType.NEXT_OBJECT):  # moqt 25 #6
            raise UsageError("a fetch needs an absolute range: the responder's Largest Object may be old")
        self._check_ranges(range_filters)
        parameters = Parameters(
            tokens=self._tokens,
            subscriber_priority=None if priority == 128 else priority,
            location_filter=filter,
            group_order=order,
            range_filters=range_filters,
        )

        def make(stream: RequestStream) -> FetchStream:
            fetch = FetchStream(self, stream, track, filter)
            if stream.request is not None:
                self.subscribing.expect_fill(stream.request.request_id, fetch, order)
            return fetch

        fetch, reply = await self._request(lambda number: Fetch(number, track, parameters), make, deadline)
        assert isinstance(reply, FetchOk)
        try:
            fetch.accepted(reply)
        except ProtocolError as error:
            self.abort(error.code, error.reason)
            raise
        await self._check_properties(fetch, reply.properties)
        self.spawn(fetch.follow(), type(fetch).__name__)
        return fetch

    async def subscribe_namespace(
        self, prefix: TrackNamespace, *, deadline: float | None = None
    ) -> NamespaceWatch:
        """Watch the namespaces under `prefix`. Raises as `subscribe` does."""
        check_namespace(prefix)
        watch, _ = await self._request(
            lambda number: SubscribeNamespace(number, prefix, Parameters(tokens=self._tokens)),
            lambda stream: NamespaceWatch(self, stream, prefix),
            deadline,
        )
        self.spawn(watch.follow(), type(watch).__name__)
        return watch

    async def publish_namespace(
        self, namespace: TrackNamespace, *, deadline: float | None = None
    ) -> Announcement:
        """Tell the peer that Tracks under `namespace` can be asked of us (moqt 11). Raises as `subscribe`
        does.
        """
        check_namespace(namespace)
        announcement, _ = await self._request(
            lambda number: PublishNamespace(number, namespace, Parameters(tokens=self._tokens)),
            lambda stream: Announcement(self, stream, namespace),
            deadline,
        )
        self.spawn(announcement.follow(), type(announcement).__name__)
        return announcement

    async def track_status(self, track: FullTrackName, *, deadline: float | None = None) -> TrackStatusResult:
        """Ask for the Largest Object and the properties of `track`. Raises as `subscribe` does."""
        made, reply = await self._request(
            lambda number: TrackStatus(number, track, Parameters(tokens=self._tokens)),
            lambda stream: OwnRequest(self, stream),
            deadline,
            fin=True,
        )
        self.forget(made)
        assert isinstance(reply, RequestOk)
        return TrackStatusResult(reply.parameters.largest, reply.properties)

    # What the rest of moqt needs of a session.

    def spawn(self, coroutine: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `coroutine` until the session ends; what goes wrong in it ends the session if it has to."""
        task = asyncio.create_task(self._guard(coroutine, what), name=f"{self.connection.id} {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def next_request_id(self) -> int:
        """A Request ID of ours that was not used yet (moqt 3.3)."""
        number, self._next_request_id = self._next_request_id, self._next_request_id + 2
        return number

    def tokens_of(self, parameters: Parameters) -> list[tuple[int, bytes]]:
        """The (type, value) pairs of a message's tokens. Raises ProtocolError, RequestRefused (moqt 2.7)."""
        return self._token_cache.resolve(parameters.tokens)

    async def in_time(self, awaitable: Awaitable[T], what: str, seconds: float | None = None) -> T:
        """Await, `seconds` at most (`limits.reply_deadline` if None). Raises DeadlineExceeded."""
        seconds = self.limits.reply_deadline if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds) as scope:
                return await awaitable
        except TimeoutError:
            if scope.expired():
                raise DeadlineExceeded(what, seconds) from None
            raise

    # Inside.

    def _setup_options(self) -> SetupOptions:
        return SetupOptions(
            path=self.uri.path_option if self.uri else None,
            authority=self.uri.authority if self.uri else None,
            tokens=self._tokens,
            max_auth_token_cache_size=self.limits.max_auth_token_cache_size,
            max_filter_ranges=self.limits.max_filter_ranges,
            implementation=IMPLEMENTATION,
            max_request_updates=self.limits.max_request_updates,
        )

    async def _request(
        self,
        build: Callable[[int], Request],
        make: Callable[[RequestStream], R],
        deadline: float | None,
        *,
        fin: bool = False,
    ) -> tuple[R, Message]:
        """Send a request and wait for its reply."""
        if self.error is not None:
            raise self.error
        if self.goaway_received.is_set():
            raise UsageError("the peer has asked us to leave (GOAWAY), so it takes no new requests")
        async with self._mapped():
            stream = await self.in_time(
                self.connection.open_when_possible(bidirectional=True),
                "stream credit for a request",
                deadline,
            )
            request = build(self.next_request_id())
            channel = RequestStream(
                stream,
                local=Sender.REQUESTER,
                is_client=self.connection.is_client,
                max_updates=self.limits.max_request_updates,
                check_id=self._peer_ids.check,
                request=request,
            )
            made = make(channel)
            self._requests.add(made)
            try:
                await channel.send_request(fin=fin)
                reply = await self.in_time(
                    channel.receive(), f"the reply to {type(request).__name__}", deadline
                )
                while isinstance(reply, Goaway):
                    reply = await self.in_time(
                        channel.receive(), f"the reply to {type(request).__name__}", deadline
                    )
                if reply is None:
                    raise RequestRejected(
                        RequestCode.INTERNAL_ERROR, "the peer ended the request without a reply"
                    )
                if isinstance(reply, RequestError):
                    await channel.finish()
                    raise rejected(reply)
            except ProtocolError as error:
                self.forget(made)
                self.abort(error.code, error.reason)
                raise
            except BaseException as error:
                self.forget(made)
                if not isinstance(error, (RequestRejected, ConnectionClosed)):
                    channel.cancel()
                raise
        return made, reply

    def forget(self, made: OwnRequest) -> None:
        """A request of ours is over."""
        self._requests.discard(made)
        self.subscribing.forget(made)

    async def _check_properties(self, reception: Subscription | FetchStream, properties: Properties) -> None:
        unknown = [kind for kind, _ in properties if kind in _MANDATORY_PROPERTIES]
        if unknown:  # moqt 13.1
            self.forget(reception)
            await reception.close()
            raise RequestRejected(
                RequestCode.UNSUPPORTED_EXTENSION,
                f"the Track has the mandatory property {unknown[0]:#x}, which is not known here",
            )

    def _check_ranges(self, range_filters: tuple[RangeFilter, ...]) -> None:
        if range_filters:
            try:
                check_range_filters(range_filters, limit=self.peer_setup.max_filter_ranges)  # moqt 8
            except RequestRefused as refusal:
                raise UsageError(f"the peer would refuse the range filters: {refusal.reason}") from None

    @asynccontextmanager
    async def _mapped(self) -> AsyncIterator[None]:
        """Turn the end of the connection into the error that callers know."""
        try:
            yield
        except ConnectionClosed as closed:
            raise _session_error(closed) from None

    async def _ready_or_closed(self) -> None:
        waits = [asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self._closed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.error is not None:
            raise self.error

    async def _guard(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await coroutine
        except ConnectionClosed:
            pass  # _watch_connection tells everyone.
        except (StreamReset, StreamStopped) as error:
            logger.debug("%s: %s: %s", self.connection.id, what, error)
        except ProtocolError as error:
            self.abort(error.code, error.reason)
        except Exception:
            logger.exception("%s: %s failed", self.connection.id, what)
            self.abort(SessionCode.INTERNAL_ERROR, "internal error")

    async def _watch_connection(self) -> None:
        closed = await self.connection.wait_closed()
        self.error = _session_error(closed)
        for made in list(self._requests):
            made.fail(self.error)
        self._requests.clear()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        self._closed.set()

    async def _accept(self) -> None:
        while True:
            stream = await self.connection.accept()
            if stream.bidirectional:
                self.spawn(self._serve(stream), "request")
            else:
                self.spawn(self._read_uni(stream), "stream")

    async def _read_uni(self, stream: Stream) -> None:
        data = b""
        while (kind := read_vi64(data, 0)) is None:
            try:
                more = await stream.read()
            except StreamReset:
                return
            if not more:
                if data:
                    raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "a stream ended inside its type")
                return
            data += more
        if kind[0] == _CONTROL_STREAM:
            await self._read_control(stream, data)
        else:
            await self.subscribing.on_stream(stream, data)

    async def _read_control(self, stream: Stream, data: bytes) -> None:
        if self._peer_control:
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "a second control stream")
        self._peer_control = True
        decoder = MessageDecoder(control=True)
        try:
            while data:
                for message in decoder.feed(data):
                    self._on_control(message)
                data = await stream.read()
        except StreamReset:
            pass
        # moqt 20 #4
        raise ProtocolError(
            SessionCode.PROTOCOL_VIOLATION, "the control stream was closed while the session runs"
        )

    def _on_control(self, message: Message) -> None:
        if isinstance(message, Setup):
            self._on_setup(message.options)
            return
        assert isinstance(message, Goaway)
        # moqt 20 #13
        if self.goaway_received.is_set() or (message.uri and not self.connection.is_client):
            raise ProtocolError(
                SessionCode.PROTOCOL_VIOLATION, "a second GOAWAY, or one with a URI from a client"
            )
        logger.info("%s: the peer asks us to leave (GOAWAY)", self.connection.id)
        self.goaway_received.set()

    def _on_setup(self, options: SetupOptions) -> None:
        if self.connection.is_client:  # moqt 20 #31
            if options.path is not None:
                raise ProtocolError(SessionCode.INVALID_PATH, "a server can't send PATH")
            if options.authority is not None:
                raise ProtocolError(SessionCode.INVALID_AUTHORITY, "a server can't send AUTHORITY")
        for text, parse, code in (
            (options.path, parse_path, SessionCode.MALFORMED_PATH),
            (options.authority, parse_authority, SessionCode.MALFORMED_AUTHORITY),
        ):
            try:
                if text:
                    parse(text)
            except UsageError as error:
                raise ProtocolError(code, str(error)) from None
        try:
            self._token_cache.resolve(options.tokens, setup_at_server=not self.connection.is_client)
        except RequestRefused as refusal:
            raise ProtocolError(SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS, refusal.reason) from None
        self.peer_setup = options
        self._ready.set()

    def _on_datagram(self, data: bytes) -> None:
        try:
            decode_datagram(
                data
            )  # Objects in datagrams are not taken; what no MOQT peer may send closes the session.
        except ProtocolError as error:
            self.abort(error.code, error.reason)

    async def _serve(self, stream: Stream) -> None:
        channel = RequestStream(
            stream,
            local=Sender.RESPONDER,
            is_client=self.connection.is_client,
            max_updates=self.limits.max_request_updates,
            check_id=self._peer_ids.check,
        )
        self._serving += 1
        try:
            await channel.receive()
            await self._ready.wait()  # moqt 3.1: requests may come before the peer's SETUP.
            assert channel.request is not None
            try:
                await self._dispatch(channel, channel.request)
            except RequestRefused as refusal:
                await channel.send(request_error(refusal, self.limits.retry_after), fin=True)
        except (StreamReset, StreamStopped):
            channel.cancel()
        finally:
            self._serving -= 1

    async def _dispatch(self, channel: RequestStream, request: Request) -> None:
        self.tokens_of(request.parameters)
        if self._leaving:
            raise RequestRefused(RequestCode.GOING_AWAY, "this endpoint is about to leave")
        if self._serving > self.limits.max_requests:
            raise RequestRefused(
                RequestCode.EXCESSIVE_LOAD, f"{self.limits.max_requests} requests are open already"
            )
        if _namespace_of(request)[:1] in [(name,) for name in _RESERVED_NAMESPACES]:  # moqt 20 #35
            raise RequestRefused(RequestCode.DOES_NOT_EXIST, "nothing is here under a reserved namespace")
        match request:
            case Subscribe():
                await self.publishing.subscribe(channel, request)
            case Fetch():
                await self.publishing.fetch(channel, request)
            case TrackStatus():
                await self.publishing.track_status(channel, request)
            case SubscribeNamespace():
                await self.publishing.subscribe_namespace(channel, request)
            case PublishNamespace():
                await self._take_namespace(channel, request)
            case Publish():
                if any(kind in _MANDATORY_PROPERTIES for kind, _ in request.properties):  # moqt 13.1
                    raise RequestRefused(
                        RequestCode.UNSUPPORTED_EXTENSION, "the Track has an unknown mandatory property"
                    )
                raise RequestRefused(RequestCode.UNINTERESTED, "this endpoint subscribes to what it wants")
            case SubscribeTracks():
                raise RequestRefused(RequestCode.NOT_SUPPORTED, "SUBSCRIBE_TRACKS is not served here")

    async def _take_namespace(self, channel: RequestStream, request: PublishNamespace) -> None:
        over = asyncio.Event()

        async def update(_message: RequestUpdate) -> None:
            await channel.send(RequestOk())  # It can only bring a token (moqt 5.2).

        self.peer_namespaces[request.namespace] = None
        try:
            await channel.send(RequestOk())
            # FIN is no withdrawal (moqt 3.4): the namespace stays until the stream is cancelled or the
            # session ends.
            await self.publishing.follow(channel, over, update, fail=over.set)
        finally:
            self.peer_namespaces.pop(request.namespace, None)

    async def _announce(self) -> None:
        """Keep the peer told of our namespaces (kvcs 6)."""
        told: dict[TrackNamespace, Announcement] = {}
        changed = asyncio.Event()
        changed.set()

        def on_change(_namespace: TrackNamespace, _present: bool) -> None:
            changed.set()

        self.tracks.watch(on_change)
        try:
            while True:
                await changed.wait()
                changed.clear()
                for namespace in [known for known in told if known not in self.tracks.namespaces]:
                    await told.pop(namespace).close()
                for namespace in self.tracks.namespaces:
                    if namespace not in told:
                        try:
                            told[namespace] = await self.publish_namespace(namespace)
                        except (RequestRejected, DeadlineExceeded, UsageError) as error:
                            logger.error("%s: the namespace was not announced: %s", self.connection.id, error)
        finally:
            self.tracks.unwatch(on_change)

    async def _leave_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._serving or self._requests:
            self.abort(SessionCode.GOAWAY_TIMEOUT, "requests were left after GOAWAY")


class _PeerIds:
    """The Request IDs that the peer has used: right parity, none twice (moqt 3.3). Compact: all below
    `_next`, and some above.
    """

    def __init__(self, *, parity: int) -> None:
        self._parity = parity
        self._next = parity
        self._above: set[int] = set()

    def check(self, number: int) -> None:
        """Note `number`. Raises ProtocolError INVALID_REQUEST_ID (moqt 20 #15)."""
        if number % 2 != self._parity or number < self._next or number in self._above:
            raise ProtocolError(
                SessionCode.INVALID_REQUEST_ID,
                f"Request ID {number} is of the wrong side, or was used before",
            )
        self._above.add(number)
        while self._next in self._above:
            self._above.remove(self._next)
            self._next += 2
        if len(self._above) > _MAX_ID_GAPS:
            raise ProtocolError(SessionCode.INVALID_REQUEST_ID, "Request IDs have too many gaps")


_MAX_ID_GAPS = 65536


def _session_error(closed: ConnectionClosed) -> MoqtError:
    if closed.application:
        return SessionClosed(closed.code, closed.reason, closed.remote)
    return ConnectionLost(closed.reason)


def _namespace_of(request: Request) -> TrackNamespace:
    if isinstance(request, PublishNamespace):
        return request.namespace
    if isinstance(request, (SubscribeNamespace, SubscribeTracks)):
        return request.prefix
    return request.track.namespace
