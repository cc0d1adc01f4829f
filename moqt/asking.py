"""A request of ours: sending it and waiting for the reply, its updates, and how it ends (moqt 3.4, 4)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from moqt.authorization import Action
from moqt.errors import (
    ConnectionLost,
    DeadlineExceeded,
    MoqtError,
    ProtocolError,
    RequestCode,
    RequestRejected,
    ResetCode,
    SessionClosed,
    StreamReset,
    UsageError,
)
from moqt.quic.api import ConnectionClosed
from moqt.requests import RequestStream
from moqt.states import Sender
from moqt.wire import Goaway, Message, Parameters, Request, RequestError, RequestOk, RequestUpdate, Token

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = ["OwnRequest", "ask", "in_time", "rejected", "session_error"]

logger = logging.getLogger(__name__)


class OwnRequest:
    """What all requests of ours have in common: the stream, the replies to updates, and how it ended."""

    def __init__(self, session: Session, stream: RequestStream) -> None:
        self.session = session
        self.request = stream
        self._updates: deque[asyncio.Future[RequestOk]] = deque()
        self._error: Exception | None = None
        self._fin = False
        """Whether the responder has said all that it had to."""

    @property
    def error(self) -> Exception | None:
        """What has ended it; None while it goes on."""
        return self._error

    async def follow(self) -> None:
        """Read the request stream to its end. Raises ProtocolError, ConnectionClosed."""
        try:
            while (message := await self.request.receive()) is not None:
                if isinstance(message, (RequestOk, RequestError)):
                    self._answer(message)
                else:
                    self._on_message(message)
            self._fin = True
            self._end_updates(_ended())  # moqt 3.4: no answer comes behind FIN.
            self._on_fin()
        except (StreamReset, RequestRejected) as error:
            self._broken(error)

    def fail(self, error: Exception) -> None:
        """The request has ended by `error`; the first one counts."""
        if self._error is None:
            self._error = error
        self._end_updates(self._error)
        self.session.forget(self)

    def lost(self, error: Exception) -> None:
        """The connection has ended; all that came on the request stream was read."""
        self.fail(error)

    async def renew(self, tokens: tuple[Token, ...]) -> None:
        """Give the peer new tokens for it, if it goes on (moqt 5.3). When the peer does not take them, the
        request ends, and tells so.
        """
        try:
            await self._update(Parameters(tokens=tokens), self.session.ids.next())
        except MoqtError as error:
            logger.info("%s: a token was not renewed: %s", self.session.connection.id, error)

    def _on_message(self, message: Message) -> None:
        """A message that is no answer to an update came."""

    def _on_fin(self) -> None:
        """The responder has said all that it had to."""

    def _broken(self, error: Exception) -> None:
        """The peer has cancelled the request, or broken it off."""
        self.request.cancel()
        self.fail(error)

    async def _update(self, parameters: Parameters, request_id: int) -> RequestOk:
        """Send a REQUEST_UPDATE and return its REQUEST_OK. Raises RequestRejected, DeadlineExceeded and what
        ended the request.
        """
        self._check_alive()
        limit = self.session.peer_setup.max_request_updates
        if limit and len(self._updates) >= limit:
            raise UsageError(
                f"{limit} REQUEST_UPDATEs are unanswered, more the peer does not take; await them first"
            )
        future: asyncio.Future[RequestOk] = asyncio.get_running_loop().create_future()
        self._updates.append(future)
        try:
            await self.request.send(RequestUpdate(request_id, parameters))
        except ConnectionClosed as closed:
            raise session_error(closed) from None
        return await in_time(future, "the reply to a REQUEST_UPDATE", self.session.limits.reply_deadline)

    def _end_updates(self, error: Exception) -> None:
        """No update is answered any more."""
        for future in self._updates:
            if not future.done():
                future.set_exception(error)
                future.exception()  # Whoever waits gets it; nobody has to.

    def _answer(self, message: RequestOk | RequestError) -> None:
        future = self._updates.popleft()
        if future.done():  # Nobody waits any more.
            return
        if isinstance(message, RequestError):
            future.set_exception(rejected(message, Action.REQUEST_UPDATE))
        else:
            future.set_result(message)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error
        if self._fin or self.request.over or self.request.finished:
            raise _ended()


R = TypeVar("R", bound=OwnRequest)
T = TypeVar("T")


async def in_time(awaitable: Awaitable[T], what: str, seconds: float) -> T:
    """Await, `seconds` at most. Raises DeadlineExceeded for `what`."""
    try:
        async with asyncio.timeout(seconds) as scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded(what, seconds) from None
        raise


async def ask(
    session: Session,
    build: Callable[[int], Request],
    make: Callable[[RequestStream], R],
    deadline: float | None,
    *,
    fin: bool = False,
) -> tuple[R, Message]:
    """Send the request that `build` gives for a Request ID, and wait for its reply, `deadline` seconds in
    all.

    `make` makes what stands for the request, before anything of it can come. Raises RequestRejected,
    StreamReset (cancelled by the peer), StreamStopped, DeadlineExceeded, SessionClosed, ConnectionLost.
    """
    if session.error is not None:
        raise session.error
    if session.goaway_received.is_set():
        raise RequestRejected(
            RequestCode.GOING_AWAY, "the peer has asked us to leave, it takes no new requests"
        )
    seconds = session.limits.reply_deadline if deadline is None else deadline
    what = "stream credit for a request"
    try:
        async with asyncio.timeout(seconds) as scope:
            stream = await session.connection.open_when_possible(bidirectional=True)
            request = build(session.ids.next())
            what = f"the reply to {type(request).__name__}"
            channel = RequestStream(
                stream,
                local=Sender.REQUESTER,
                is_client=session.connection.is_client,
                max_updates=session.limits.max_request_updates,
                ids=session.ids,
                request=request,
            )
            made = make(channel)
            session.keep(made)
            try:
                reply = await _exchange(channel, fin)
                if fin:
                    session.spawn(_leave(channel, session.limits.linger), "end of a request")
                return made, reply
            except BaseException as error:
                if isinstance(error, ProtocolError):
                    session.abort(error.code, error.reason)
                elif isinstance(error, RequestRejected):
                    session.spawn(_leave(channel, session.limits.linger), "end of a request")
                else:
                    channel.cancel()
                broken = made.error
                # What came of it already goes with it.
                made.fail(error if isinstance(error, Exception) else StreamReset(ResetCode.CANCELLED))
                if broken is not None and isinstance(error, StreamReset):
                    raise broken from None  # A data stream broke before the reply: that is why.
                raise
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded(what, seconds) from None
        raise
    except ConnectionClosed as closed:
        raise session_error(closed) from None


async def _exchange(channel: RequestStream, fin: bool) -> Message:
    await channel.send_request(fin=fin)
    while isinstance(reply := await channel.receive(), Goaway):
        pass
    assert reply is not None  # FIN without a reply is an error (moqt 3.4).
    if isinstance(reply, RequestError):
        assert channel.request is not None
        raise rejected(reply, Action.of(channel.request))
    return reply


async def _leave(channel: RequestStream, seconds: float) -> None:
    """The request is over with its reply: FIN, and read what the peer still says, to its FIN, `seconds` at
    most (moqt 3.4). Else a second final reply would not be seen (moqt 20 #22), and the stream never go.
    """
    await channel.finish()
    try:
        async with asyncio.timeout(seconds):
            await channel.drain()
    except TimeoutError:
        channel.stream.stop(ResetCode.CANCELLED)


def _ended() -> RequestRejected:
    return RequestRejected(RequestCode.INTERNAL_ERROR, "the request is over, nothing can be updated")


def rejected(message: RequestError, action: Action) -> RequestRejected:
    """The exception for a REQUEST_ERROR that answers `action`."""
    return RequestRejected(
        message.code, message.reason, message.retry_after, message.redirect, what=action.name
    )


def session_error(closed: ConnectionClosed) -> MoqtError:
    """What the end of the connection means to the users of a session."""
    if closed.application:
        return SessionClosed(closed.code, closed.reason, closed.remote)
    return ConnectionLost(closed.reason)
