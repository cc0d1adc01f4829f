"""One request stream: messages over a bidirectional stream, checked against the table of states (moqt 3.4,
4.1).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from moqt.errors import (
    ProtocolError,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionCode,
    StreamReset,
    StreamStopped,
    UsageError,
)
from moqt.names import TrackNamespace, format_namespace
from moqt.quic.api import Stream
from moqt.states import COMPLETE, TRANSITIONS, RequestState, Sender
from moqt.wire import (
    Goaway,
    Message,
    MessageDecoder,
    PublishNamespace,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
    encode,
)

__all__ = ["RequestIds", "RequestStream", "namespace_of", "subject_of"]

_NAMESPACE_REQUESTS = (PublishNamespace, SubscribeNamespace, SubscribeTracks)

_SLICE = 16 * 1024
"""Bytes that are decoded at once, so that a chunk of many small messages does not take much memory."""

_MAX_ID_GAPS = 65536
"""Ranges of Request IDs, passed over by the peer, that may still come."""


class RequestIds:
    """The Request IDs of both sides: ours are even on a client and odd on a server, the peer's the others
    (moqt 3.3).

    An ID may come late, or never: a request that was cancelled before it left has taken one too. What the
    peer has used is kept compactly, as all below `_expected` but those in `_gaps`.
    """

    def __init__(self, *, is_client: bool) -> None:
        self._next = 0 if is_client else 1
        self._expected = 1 if is_client else 0
        self._gaps: list[range] = []

    def next(self) -> int:
        """An ID of ours that was not used yet."""
        number, self._next = self._next, self._next + 2
        return number

    def check(self, number: int) -> None:
        """Note an ID that the peer uses. Raises ProtocolError INVALID_REQUEST_ID (moqt 20 #15)."""
        if number % 2 != self._expected % 2:
            raise ProtocolError(
                SessionCode.INVALID_REQUEST_ID, f"Request ID {number} is one of the other side's"
            )
        if number >= self._expected:
            if number > self._expected:
                self._gaps.append(range(self._expected, number, 2))
            self._expected = number + 2
        else:
            index = bisect_right(self._gaps, number, key=lambda gap: gap.start) - 1
            if index < 0 or number not in self._gaps[index]:
                raise ProtocolError(SessionCode.INVALID_REQUEST_ID, f"Request ID {number} was used before")
            gap = self._gaps[index]
            parts = range(gap.start, number, 2), range(number + 2, gap.stop, 2)
            self._gaps[index : index + 1] = [part for part in parts if part]
        del self._gaps[:-_MAX_ID_GAPS]  # The oldest ones count as used.


class RequestStream:
    """A request and all that is said about it. `local` tells which side of it we are.

    `ids` checks the Request ID of each request and update that the peer sends; `max_updates` is how many of
    its updates may wait for an answer (0: any number).
    """

    def __init__(
        self,
        stream: Stream,
        *,
        local: Sender,
        is_client: bool,
        max_updates: int,
        ids: RequestIds,
        request: Request | None = None,
    ) -> None:
        self.stream = stream
        self.local = local
        self.remote = Sender.RESPONDER if local is Sender.REQUESTER else Sender.REQUESTER
        self.request = request
        self.state = RequestState.PENDING
        self.goaway: Goaway | None = None
        self.finished = False
        self._is_client = is_client
        self._max_updates = max_updates
        self._ids = ids
        self._decoder = MessageDecoder(request=type(request) if request else None)
        self._data = memoryview(b"")
        self._decoded = False
        """Whether a part of what came with `_data` was decoded."""
        self._received: deque[Message] = deque()
        self._unanswered_of_peer = 0
        self._unanswered_of_ours = 0
        self._cancelled: int | None = None
        self._writing = asyncio.Lock()

    @property
    def cancelled(self) -> bool:
        """Whether one side has cancelled the request."""
        return self._cancelled is not None or self.stream.stopped is not None

    @property
    def over(self) -> bool:
        """Whether nothing more can be asked of the request: it was cancelled, rejected, or has had its last
        message.
        """
        return self.cancelled or self.state.over

    @property
    def _name(self) -> str:
        return type(self.request).__name__

    async def receive(self) -> Message | None:
        """The next message of the peer; None at its FIN.

        Raises StreamReset when the request was cancelled, RequestRejected when FIN came before all that the
        peer owes (moqt 3.4), ProtocolError, ConnectionClosed. A message is checked when it arrives: one that
        breaks the protocol makes this raise before those that came with it are returned.
        """
        while True:
            if self._cancelled is not None:
                raise StreamReset(self._cancelled)
            if self._received:
                return self._received.popleft()
            if self._data:
                if self._decoded:  # More of it: others get their turn.
                    await asyncio.sleep(0)
                self._decoded = True
                part, self._data = self._data[:_SLICE], self._data[_SLICE:]
                for message in self._decoder.feed(part):
                    self._check(message)
                    self._received.append(message)
                continue
            try:
                data = await self.stream.read()
            except UsageError:
                if self._cancelled is None:
                    raise
                continue  # `cancel` stopped the stream while we waited.
            if not data:
                self._check_fin()
                return None
            self._data, self._decoded = memoryview(data), False

    async def drain(self, heed: Callable[[Message], None] | None = None) -> None:
        """Read what the peer still says about a request that is over, to its FIN, and ignore it, unless
        `heed` is to see it; what breaks the protocol does so here too. Raises ProtocolError,
        ConnectionClosed.
        """
        try:
            while (message := await self.receive()) is not None:
                if heed is not None:
                    heed(message)
        except (StreamReset, RequestRejected):
            self.cancel()

    async def send(self, message: Message, *, fin: bool = False) -> None:
        """Send a message; with `fin` it is our last. Raises StreamStopped, ConnectionClosed, and UsageError
        for a message that has no place here.

        Messages of several tasks do not mix. A caller that is cancelled while its message leaves cancels the
        request, since nothing can follow half a message.
        """
        if self.request is None:
            raise UsageError("the request itself comes first")
        state = TRANSITIONS.get((type(self.request), self.local, self.state, type(message)))
        if state is None or self.finished:
            raise UsageError(f"{type(message).__name__} can't be sent for a {self._name}: {self.state.value}")
        if isinstance(message, RequestUpdate):
            self._unanswered_of_ours += 1
        elif isinstance(message, (RequestOk, RequestError)) and self.state is RequestState.ESTABLISHED:
            self._unanswered_of_peer -= 1
        self.state = state
        await self._write(encode(message), fin)

    async def send_request(self, *, fin: bool = False) -> None:
        """Send the request itself."""
        assert self.request is not None
        await self._write(encode(self.request), fin)

    async def finish(self) -> None:
        """FIN our direction, if it isn't done."""
        if not self.finished and not self.cancelled:
            await self._write(b"", True)

    def cancel(self, code: ResetCode = ResetCode.CANCELLED) -> None:
        """End the request: reset our direction, and stop the peer's (moqt 3.4)."""
        if self._cancelled is None:
            self._cancelled = code
            self.stream.reset(code)
            self.stream.stop(code)

    async def _write(self, data: bytes, fin: bool) -> None:
        self.finished = self.finished or fin
        try:
            async with self._writing:
                await self.stream.write(data, fin=fin)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except UsageError:
            if self._cancelled is None:
                raise
            raise StreamStopped(self._cancelled) from None  # `cancel` reset it while we waited.

    def _check_fin(self) -> None:
        """Whether the peer may end its direction here (moqt 3.4, 25 #14)."""
        self._decoder.finish()
        if self.request is None:
            raise _violation("a request stream ended before its request")
        if self.state not in COMPLETE[type(self.request), self.remote]:
            raise RequestRejected(
                RequestCode.INTERNAL_ERROR, f"the peer ended the stream of a {self._name}: {self.state.value}"
            )

    def _check(self, message: Message) -> None:
        if self.request is None:  # The decoder lets nothing but a request be the first (moqt 20 #3).
            assert isinstance(message, Request)
            self._ids.check(message.request_id)
            self.request = message
            return
        state = TRANSITIONS.get((type(self.request), self.remote, self.state, type(message)))
        if state is None:
            raise _violation(
                f"{type(message).__name__} from the {self.remote.value} of a {self._name}: {self.state.value}"
            )
        if isinstance(message, RequestUpdate):
            self._ids.check(message.request_id)
            self._unanswered_of_peer += 1
            if self._max_updates and self._unanswered_of_peer > self._max_updates:  # moqt 20 #18
                raise ProtocolError(
                    SessionCode.TOO_MANY_REQUEST_UPDATES,
                    f"more than {self._max_updates} REQUEST_UPDATEs without an answer",
                )
        elif isinstance(message, (RequestOk, RequestError)) and self.state is RequestState.ESTABLISHED:
            if not self._unanswered_of_ours:  # moqt 20 #22
                raise _violation(f"a second reply to a {self._name}")
            self._unanswered_of_ours -= 1
        if (
            isinstance(message, RequestOk)
            and message.properties
            and not isinstance(self.request, TrackStatus)
        ):  # moqt 20 #19
            raise _violation("Track Properties in a REQUEST_OK that answers no TRACK_STATUS")
        if isinstance(message, RequestError) and message.redirect is not None:
            self._check_redirect(message)
        if isinstance(message, Goaway):
            if self.goaway is not None or (message.uri and not self._is_client):  # moqt 20 #13
                raise _violation(
                    "a second GOAWAY on one stream" if self.goaway else "a GOAWAY with a URI from a client"
                )
            self.goaway = message
        self.state = state

    def _check_redirect(self, message: RequestError) -> None:
        redirect = message.redirect
        assert redirect is not None
        if redirect.uri and not self._is_client:  # moqt 20 #13
            raise _violation("a Redirect with a URI from a client")
        if isinstance(self.request, _NAMESPACE_REQUESTS) and redirect.track.name:  # moqt 20 #14
            raise _violation("a Redirect with a Track Name for a request about a namespace")


def _violation(reason: str) -> ProtocolError:
    return ProtocolError(SessionCode.PROTOCOL_VIOLATION, reason)


def namespace_of(request: Request) -> TrackNamespace:
    """The namespace, or prefix of namespaces, that a request is about."""
    if isinstance(request, PublishNamespace):
        return request.namespace
    if isinstance(request, (SubscribeNamespace, SubscribeTracks)):
        return request.prefix
    return request.track.namespace


def subject_of(request: Request) -> str:
    """The Full Track Name or namespace that a request is about, in its text form (moqt 2.3)."""
    if isinstance(request, (PublishNamespace, SubscribeNamespace, SubscribeTracks)):
        return format_namespace(namespace_of(request))
    return str(request.track)
