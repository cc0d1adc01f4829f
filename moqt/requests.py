"""One request stream: messages over a bidirectional stream, checked against the table of states (moqt 3.4,
4.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moqt.errors import (
    ProtocolError,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionCode,
    StreamReset,
    UsageError,
)
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

__all__ = ["RequestStream"]

_NAMESPACE_REQUESTS = (PublishNamespace, SubscribeNamespace, SubscribeTracks)


class RequestStream:
    """A request and all that is said about it. `local` tells which side of it we are.

    `check_id` is called with the Request ID of each request and update that the peer sends.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        local: Sender,
        is_client: bool,
        max_updates: int,
        check_id: Callable[[int], None],
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
        self._check_id = check_id
        self._decoder = MessageDecoder(request=type(request) if request else None)
        self._received: deque[Message] = deque()
        self._unanswered_of_peer = 0
        self._unanswered_of_ours = 0
        self._cancelled: int | None = None

    @property
    def cancelled(self) -> bool:
        """Whether one side has cancelled the request."""
        return self._cancelled is not None or self.stream.stopped is not None

    @property
    def _name(self) -> str:
        return type(self.request).__name__

    async def receive(self) -> Message | None:
        """The next message of the peer; None at its FIN.

        Raises StreamReset when the request was cancelled, RequestRejected when FIN came before all that the
        peer owes (moqt 3.4), ProtocolError, ConnectionClosed.
        """
        while not self._received:
            if self._cancelled is not None:
                raise StreamReset(self._cancelled)
            try:
                data = await self.stream.read()
            except UsageError:
                if self._cancelled is None:
                    raise
                continue  # `cancel` stopped the stream while we waited.
            if not data:
                self._decoder.finish()
                if self.request is None:
                    raise ProtocolError(
                        SessionCode.PROTOCOL_VIOLATION, "a request stream ended before its request"
                    )
                if self.state not in COMPLETE[type(self.request), self.remote]:
                    raise RequestRejected(
                        RequestCode.INTERNAL_ERROR,
                        f"the peer ended the stream of a {self._name}: {self.state.value}",
                    )
                return None
            self._received.extend(self._decoder.feed(data))
        message = self._received.popleft()
        self._check(message)
        return message

    async def send(self, message: Message, *, fin: bool = False) -> None:
        """Send a message; with `fin` it is our last. Raises StreamStopped, ConnectionClosed."""
        if self.request is None:
            raise UsageError("the request itself comes first")
        state = TRANSITIONS.get((type(self.request), self.local, self.state, type(message)))
        if state is None:
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
        await self.stream.write(data, fin=fin)

    def _check(self, message: Message) -> None:
        if self.request is None:  # The decoder lets nothing but a request be the first (moqt 20 #3).
            assert isinstance(message, Request)
            self._check_id(message.request_id)
            self.request = message
            return
        state = TRANSITIONS.get((type(self.request), self.remote, self.state, type(message)))
        if state is None:
            raise _violation(
                f"{type(message).__name__} from the {self.remote.value} of a {self._name}: {self.state.value}"
            )
        if isinstance(message, RequestUpdate):
            self._check_id(message.request_id)
            self._unanswered_of_peer += 1
            if self._unanswered_of_peer > self._max_updates:  # moqt 20 #18
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
