"""Namespaces, from both sides: who has Tracks under which prefix (moqt 11)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moqt.asking import OwnRequest
from moqt.authorization import Authority, Denied
from moqt.errors import (
    MoqtError,
    ProtocolError,
    RequestCode,
    RequestRefused,
    RequestRejected,
    ResetCode,
    SessionCode,
    StreamReset,
)
from moqt.names import TrackNamespace, check_namespace, format_namespace, is_prefix, printable
from moqt.requests import RequestStream
from moqt.wire import (
    Message,
    Namespace,
    NamespaceDone,
    Parameters,
    PublishNamespace,
    RequestOk,
    RequestUpdate,
    SubscribeNamespace,
)

if TYPE_CHECKING:
    from moqt.session import Session

__all__ = [
    "Announcement",
    "NamespaceEvent",
    "NamespaceWatch",
    "announce",
    "claim",
    "serve_namespaces",
    "take_namespace",
]

logger = logging.getLogger(__name__)

SHOWN = 40
"""Characters of a namespace in an error: enough to know it by, and no more in a log (kvcs 11)."""

LONGEST_PAUSE = 60.0
"""Seconds at most until a namespace that was refused is announced again, unless the peer says more."""


@dataclass(frozen=True, slots=True)
class NamespaceEvent:
    """A full namespace appeared (`present`) or went."""

    namespace: TrackNamespace
    present: bool


class NamespaceWatch(OwnRequest):
    """A SUBSCRIBE_NAMESPACE: `async for` gives a NamespaceEvent for each namespace that comes or goes, until
    it breaks.

    `namespaces` are those that are here now. A namespace that came and went before anybody looked makes no
    event.
    """

    def __init__(self, session: Session, stream: RequestStream, prefix: TrackNamespace) -> None:
        super().__init__(session, stream)
        self.prefix = prefix
        self.namespaces: dict[TrackNamespace, None] = {}
        self._events: dict[TrackNamespace, bool] = {}
        self._wake = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> NamespaceWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[NamespaceEvent]:
        return self

    async def __anext__(self) -> NamespaceEvent:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        namespace = next(iter(self._events))
        return NamespaceEvent(namespace, self._events.pop(namespace))

    async def close(self) -> None:
        """End the watch. Idempotent."""
        if not self._closed:
            self._closed = True
            self._events.clear()
            self._wake.set()
            self.session.forget(self)
            self.request.cancel()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after the events that came before."""
        super().fail(error)
        self._wake.set()

    def _on_message(self, message: Message) -> None:
        if isinstance(message, (Namespace, NamespaceDone)):
            self._note((*self.prefix, *message.suffix), isinstance(message, Namespace))

    def _on_fin(self) -> None:
        # moqt 11: with it all its namespaces are gone; it was no end of ours.
        self._broken(StreamReset(ResetCode.CANCELLED))

    def _note(self, namespace: TrackNamespace, present: bool) -> None:
        try:
            check_namespace(namespace)
        except ValueError as error:
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, str(error)) from None
        known = namespace in self.namespaces
        if present and known:
            return
        if not present and not known:  # moqt 20 #20
            raise ProtocolError(SessionCode.PROTOCOL_VIOLATION, "NAMESPACE_DONE without its NAMESPACE")
        if present:
            self.namespaces[namespace] = None
        else:
            del self.namespaces[namespace]
        if self._closed or self._error is not None:
            return
        if self._events.pop(namespace, present) == present:
            self._events[namespace] = present
        limit = self.session.limits.max_namespaces
        if len(self.namespaces) > limit or len(self._events) > 2 * limit:
            self.request.cancel(ResetCode.EXCESSIVE_LOAD)
            self.fail(StreamReset(ResetCode.EXCESSIVE_LOAD))
        self._wake.set()


class Announcement(OwnRequest):
    """A PUBLISH_NAMESPACE that the peer accepted; `close` withdraws it."""

    def __init__(self, session: Session, stream: RequestStream, namespace: TrackNamespace) -> None:
        super().__init__(session, stream)
        self.namespace = namespace
        self.over = asyncio.Event()
        """Set when the peer does not take it any more."""

    def fail(self, error: Exception) -> None:
        """The peer does not take it any more."""
        super().fail(error)
        self.over.set()

    async def close(self) -> None:
        """Withdraw the namespace (moqt 11). Idempotent."""
        self.session.forget(self)
        self.request.cancel()


async def announce(session: Session) -> None:
    """Keep the peer told of the namespaces of `session.tracks` (kvcs 6)."""
    told: dict[TrackNamespace, asyncio.Event] = {}
    changed = _watched(session)
    try:
        while True:
            await changed.wait()
            changed.clear()
            present = dict.fromkeys(session.tracks.namespaces)
            for namespace in [known for known in told if known not in present]:
                told.pop(namespace).set()
            for namespace in present:
                if namespace not in told:
                    told[namespace] = asyncio.Event()
                    session.spawn(_announce_one(session, namespace, told[namespace]), "PUBLISH_NAMESPACE")
    finally:
        session.tracks.unwatch(changed.on_change)


async def _announce_one(session: Session, namespace: TrackNamespace, withdrawn: asyncio.Event) -> None:
    """Keep one namespace announced until it is withdrawn. What is refused is tried again when the peer
    invites to (moqt 4.2), and when we have other tokens.
    """
    pause = 0.1
    while not withdrawn.is_set():
        renewed = session.renewed
        error = await _announce_once(session, namespace, withdrawn)
        if error is None or session.closed:
            return
        again = error.retry_after if isinstance(error, RequestRejected) else None
        if session.on_announced is not None:
            session.on_announced(namespace, error)
        else:
            log = logger.error if again is None else logger.warning
            shown = printable(format_namespace(namespace), SHOWN)
            log("%s: %s was not announced: %s", session.connection.id, shown, error)
        if again is not None:
            pause = max(again, min(2 * pause, LONGEST_PAUSE))
        await _first_of(withdrawn, renewed, seconds=None if again is None else pause)


async def _announce_once(
    session: Session, namespace: TrackNamespace, withdrawn: asyncio.Event
) -> Exception | None:
    """Announce one namespace until it is withdrawn; returns why not, if the peer does not take it (any
    more).
    """
    try:
        announcement = await session.publish_namespace(namespace)
    except MoqtError as error:
        return error
    if session.on_announced is not None:
        session.on_announced(namespace, None)
    await _first_of(withdrawn, announcement.over)
    if not withdrawn.is_set():
        return announcement.error
    await announcement.close()
    return None


async def _first_of(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until one of `events` is set, `seconds` at most."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def take_namespace(
    session: Session, stream: RequestStream, message: PublishNamespace, authority: Authority
) -> None:
    """Accept a PUBLISH_NAMESPACE, and note it in `session.peer_namespaces` while it lasts. Raises
    RequestRefused before the reply.
    """

    async def update(_message: RequestUpdate) -> None:
        # It can only bring a token (moqt 5.2).
        await stream.send(RequestOk(Parameters(expires=authority.expires)))

    over = asyncio.Event()
    known = session.peer_namespaces
    limit = session.limits.max_announcements
    if sum(known.values()) >= limit:
        raise RequestRefused(RequestCode.EXCESSIVE_LOAD, f"{limit} namespaces are announced already")
    known[message.namespace] = known.get(message.namespace, 0) + 1
    if known[message.namespace] == 1:
        session.tracks.offered(session, message.namespace, True)
    authority.when_lost(_canceller(stream, over))
    try:
        await stream.send(RequestOk(Parameters(expires=authority.expires)))
        # FIN is no withdrawal (moqt 3.4): the namespace stays until the stream is cancelled or the session
        # ends.
        await session.publishing.follow(stream, authority, over, update, fail=over.set)
    finally:
        known[message.namespace] -= 1
        if not known[message.namespace]:
            del known[message.namespace]
            session.tracks.offered(session, message.namespace, False)


async def serve_namespaces(
    session: Session, stream: RequestStream, message: SubscribeNamespace, authority: Authority
) -> None:
    """Serve a SUBSCRIBE_NAMESPACE until it ends. Raises RequestRefused before the reply."""
    await _NamespaceFeed(session, stream, message.prefix, authority).serve()


def _canceller(stream: RequestStream, over: asyncio.Event) -> Callable[[Denied], None]:
    """Ends a request about namespaces when the right to it is lost: it is cancelled (moqt 11)."""

    def cancel(denied: Denied) -> None:
        stream.cancel(denied.reset_code)
        over.set()

    return cancel


class _Changes(asyncio.Event):
    """Set whenever a namespace comes or goes."""

    def on_change(self, _namespace: TrackNamespace, _present: bool) -> None:
        self.set()


def _watched(session: Session) -> _Changes:
    changes = _Changes()
    changes.set()
    session.tracks.watch(changes.on_change)
    return changes


class _NamespaceFeed:
    """NAMESPACE and NAMESPACE_DONE for one SUBSCRIBE_NAMESPACE, as namespaces come and go."""

    def __init__(
        self, session: Session, stream: RequestStream, prefix: TrackNamespace, authority: Authority
    ) -> None:
        self._session = session
        self._stream = stream
        self._prefix = prefix
        self._authority = authority
        self._sent: set[TrackNamespace] = set()
        self._changes: dict[TrackNamespace, None] = {}
        """What may have come or gone; to look at all there is would be a lot for each change."""
        self._changed = asyncio.Event()
        # Suffixes have a meaning only with the prefix of their time: one of both speaks at a time.
        self._speaking = asyncio.Lock()

    async def serve(self) -> None:
        claim(self._session, self._session.publishing.prefixes, self._prefix)
        over = asyncio.Event()
        teller = None
        self._begin()
        self._session.tracks.watch(self._on_change)
        self._authority.when_lost(_canceller(self._stream, over))
        self._session.tracks.wanted(self._session, self._prefix, True)
        try:
            await self._stream.send(self._ok())
            teller = self._session.spawn(self._tell(), "NAMESPACE")
            await self._session.publishing.follow(
                self._stream, self._authority, over, self._update, fail=over.set
            )
        finally:
            self._session.tracks.unwatch(self._on_change)
            self._session.tracks.wanted(self._session, self._prefix, False)
            self._session.publishing.prefixes.remove(self._prefix)
            if teller is not None:
                teller.cancel()

    def _begin(self) -> None:
        """Look at all there is."""
        self._sent.clear()
        here = (known for known in self._session.tracks.namespaces if is_prefix(self._prefix, known))
        self._changes = dict.fromkeys(here)
        self._changed.set()

    def _on_change(self, namespace: TrackNamespace, _present: bool) -> None:
        if is_prefix(self._prefix, namespace):
            self._changes[namespace] = None
            self._changed.set()

    async def _update(self, message: RequestUpdate) -> None:
        async with self._speaking:
            wanted = message.parameters.prefix
            if wanted is not None and wanted != self._prefix:
                claim(self._session, self._session.publishing.prefixes, wanted, instead_of=self._prefix)
                self._session.tracks.wanted(self._session, wanted, True)
                self._session.tracks.wanted(self._session, self._prefix, False)
                self._prefix = wanted
                self._begin()
            await self._stream.send(self._ok())

    def _ok(self) -> RequestOk:
        return RequestOk(Parameters(expires=self._authority.expires))

    async def _tell(self) -> None:
        while True:
            await self._changed.wait()
            async with self._speaking:
                self._changed.clear()
                await self._tell_changes()

    async def _tell_changes(self) -> None:
        length = len(self._prefix)
        while self._changes:
            namespace = next(iter(self._changes))
            del self._changes[namespace]
            present = self._session.tracks.announces(namespace)
            if present and namespace not in self._sent:
                self._sent.add(namespace)
                await self._say(Namespace(namespace[length:]))
            elif not present and namespace in self._sent:
                self._sent.discard(namespace)
                await self._say(NamespaceDone(namespace[length:]))

    async def _say(self, message: Message) -> None:
        if not self._stream.finished:  # A refused update ends it.
            await self._stream.send(message)


def claim(
    session: Session,
    taken: list[TrackNamespace],
    prefix: TrackNamespace,
    *,
    instead_of: TrackNamespace | None = None,
) -> None:
    """Note a prefix of a session among those `taken`. Raises RequestRefused when it overlaps with another
    one, or is one too many (moqt 11).
    """
    others = list(taken)
    if instead_of is not None:
        others.remove(instead_of)
    limit = session.limits.max_prefixes
    if len(others) >= limit:
        raise RequestRefused(RequestCode.EXCESSIVE_LOAD, f"{limit} prefixes are watched already")
    if any(is_prefix(prefix, known) or is_prefix(known, prefix) for known in others):
        raise RequestRefused(
            RequestCode.PREFIX_OVERLAP, "the prefix overlaps with another one of this session"
        )
    taken[:] = [*others, prefix]
