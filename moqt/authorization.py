"""Who may do what: the question, the answer, and the policy that is asked (moqt 2.7, 15 #16, 21).

The session asks before it looks anything up, so that an answer cannot depend on whether the thing that is
asked for exists, and before anything is asked upstream. A policy that fails denies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final, Protocol, TypeAlias

from moqt.errors import DoneCode, RequestCode, RequestRefused, ResetCode, SessionCode
from moqt.names import TrackNamespace, printable
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

__all__ = [
    "AccessRequest",
    "Action",
    "AllowAll",
    "Allowed",
    "Authority",
    "Decision",
    "Denied",
    "DenyAll",
    "Policy",
    "TokenPair",
    "ask",
]

logger = logging.getLogger(__name__)

DECISION_DEADLINE: Final = 5.0
"""Seconds that a policy may take (moqt 21: bounded replies)."""

TokenPair: TypeAlias = tuple[int, bytes]
"""Token Type and Token Value, aliases resolved."""


class Action(Enum):
    """What a peer wants to do."""

    SETUP = auto()
    PUBLISH_NAMESPACE = auto()
    SUBSCRIBE_NAMESPACE = auto()
    SUBSCRIBE = auto()
    REQUEST_UPDATE = auto()
    PUBLISH = auto()
    FETCH = auto()
    TRACK_STATUS = auto()
    SUBSCRIBE_TRACKS = auto()

    @classmethod
    def of(cls, message: Request) -> Action:
        """What `message` asks for."""
        return _ACTIONS[type(message)]


_ACTIONS: Final[dict[type[Request], Action]] = {
    PublishNamespace: Action.PUBLISH_NAMESPACE,
    SubscribeNamespace: Action.SUBSCRIBE_NAMESPACE,
    Subscribe: Action.SUBSCRIBE,
    Publish: Action.PUBLISH,
    Fetch: Action.FETCH,
    TrackStatus: Action.TRACK_STATUS,
    SubscribeTracks: Action.SUBSCRIBE_TRACKS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRequest:
    """What a policy decides about. Its repr never shows a token.

    Raises ValueError for a REQUEST_UPDATE of nothing, and for an update that is no REQUEST_UPDATE.
    """

    action: Action
    namespace: TrackNamespace = ()
    """The namespace, or the prefix of SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS; nothing for SETUP."""
    name: bytes | None = None
    """The Track Name; None where the action is not about one track."""
    updates: Action | None = None
    """For REQUEST_UPDATE: the action of the request that it changes."""
    tokens: tuple[TokenPair, ...] = field(default=(), repr=False)
    """Those of the message itself."""
    held_tokens: tuple[TokenPair, ...] = field(default=(), repr=False)
    """Those from before: of SETUP, and of the request that is updated or goes on."""
    session: str = ""
    """Names the connection in logs."""
    peer: str = ""
    """The peer's address, for logs."""

    def __post_init__(self) -> None:
        if (self.action is Action.REQUEST_UPDATE) != (self.updates is not None):
            raise ValueError("REQUEST_UPDATE, and nothing else, says which action it updates")

    @classmethod
    def of(
        cls,
        message: Request,
        tokens: Sequence[TokenPair],
        *,
        held_tokens: Sequence[TokenPair] = (),
        session: str = "",
        peer: str = "",
    ) -> AccessRequest:
        """What `message` asks for, with its `tokens` after aliases were resolved."""
        name = None
        if isinstance(message, PublishNamespace):
            namespace = message.namespace
        elif isinstance(message, SubscribeNamespace | SubscribeTracks):
            namespace = message.prefix
        else:
            namespace, name = message.track.namespace, message.track.name
        return cls(
            action=Action.of(message),
            namespace=namespace,
            name=name,
            tokens=tuple(tokens),
            held_tokens=tuple(held_tokens),
            session=session,
            peer=peer,
        )

    @property
    def needs(self) -> tuple[Action, ...]:
        """All that has to be allowed. An update must not reach what the request itself could not."""
        return (self.action,) if self.updates is None else (self.action, self.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Yes, for now."""

    revalidate_after: float | None = None
    """Seconds, more than 0, after which to ask again while the action goes on; None: never."""
    expires_after: float | None = None
    """Seconds after which the right ends if it is not renewed; None: not by time."""
    subject: str = ""
    """Who was allowed, for logs."""

    def __post_init__(self) -> None:
        if self.revalidate_after is not None and not self.revalidate_after > 0:
            raise ValueError(f"revalidate_after is more than 0 s, not {self.revalidate_after}")


@dataclass(frozen=True, slots=True)
class Denied:
    """No. `reason` is told to the peer."""

    code: RequestCode = RequestCode.UNAUTHORIZED
    reason: str = "not authorized"

    @property
    def refusal(self) -> RequestRefused:
        """The answer to a request."""
        return RequestRefused(self.code, self.reason)

    @property
    def session_code(self) -> SessionCode:
        """Closes the session whose SETUP is denied."""
        return _SESSION_CODES.get(self.code, SessionCode.INTERNAL_ERROR)

    @property
    def done_code(self) -> DoneCode:
        """Ends a subscription that ran: the status of PUBLISH_DONE."""
        return _DONE_CODES.get(self.code, DoneCode.UNAUTHORIZED)

    @property
    def reset_code(self) -> ResetCode:
        """Ends the data stream of a fetch or fill that ran (security 3.2); no other code is about rights."""
        return ResetCode.EXPIRED_AUTH_TOKEN


_SESSION_CODES: Final = {
    RequestCode.UNAUTHORIZED: SessionCode.UNAUTHORIZED,
    RequestCode.MALFORMED_AUTH_TOKEN: SessionCode.MALFORMED_AUTH_TOKEN,
    RequestCode.EXPIRED_AUTH_TOKEN: SessionCode.EXPIRED_AUTH_TOKEN,
}
_DONE_CODES: Final = {
    RequestCode.EXPIRED_AUTH_TOKEN: DoneCode.EXPIRED,
    RequestCode.INTERNAL_ERROR: DoneCode.INTERNAL_ERROR,
    RequestCode.TIMEOUT: DoneCode.INTERNAL_ERROR,
}

Decision: TypeAlias = Allowed | Denied


class Policy(Protocol):
    """Decides. It is told nothing of what exists, and must not find out: absent and forbidden look alike."""

    async def decide(self, request: AccessRequest) -> Decision:
        """Whether the peer may do this now."""


class AllowAll:
    """Anyone may do anything: for tests, and for endpoints that only listen on loopback."""

    async def decide(self, request: AccessRequest) -> Decision:
        """Yes."""
        return Allowed()


class DenyAll:
    """Nobody may do anything but set a session up."""

    async def decide(self, request: AccessRequest) -> Decision:
        """No, except for SETUP, which gives no right by itself."""
        return Allowed() if request.action is Action.SETUP else Denied()


async def ask(policy: Policy, request: AccessRequest, *, deadline: float = DECISION_DEADLINE) -> Decision:
    """The policy's decision. A policy that raises, or takes longer than `deadline` seconds, denies."""
    try:
        async with asyncio.timeout(deadline):
            decision = await policy.decide(request)
    except TimeoutError:
        decision = Denied(RequestCode.TIMEOUT, "the decision took too long")
    except Exception:
        logger.exception("%s: the policy failed for %s", request.session, request.action.name)
        decision = Denied(RequestCode.INTERNAL_ERROR, "internal error")
    # No names: they identify who asks for which content (kvcs 11).
    if isinstance(decision, Denied):
        outcome = f"denied with {decision.code.name}: {printable(decision.reason)}"
        logger.info("%s (%s): %s %s", request.session, request.peer, request.action.name, outcome)
    else:
        logger.debug(
            "%s: %s allowed to %s", request.session, request.action.name, printable(decision.subject)
        )
    return decision


class Authority:
    """The right to one request for as long as it goes on: renewed by its updates, asked for again in time.

    `denied` is set once the right is lost, while `watch` runs.
    """

    def __init__(self, policy: Policy, request: AccessRequest, allowed: Allowed) -> None:
        self.denied: Denied | None = None
        self._policy = policy
        self._request = request
        self._renewed = asyncio.Event()
        self._end: Callable[[Denied], None] | None = None
        self._take(allowed)

    @classmethod
    async def obtain(cls, policy: Policy, request: AccessRequest) -> Authority:
        """Raises RequestRefused if the policy denies."""
        decision = await ask(policy, request)
        if isinstance(decision, Denied):
            raise decision.refusal
        return cls(policy, request, decision)

    def fork(self) -> Authority:
        """The same right for something else that begins now, and may go on longer."""
        return Authority(self._policy, self._request, self.allowed)

    @property
    def expires(self) -> int | None:
        """EXPIRES: the milliseconds until the right ends if it is not renewed; None: not by time (moqt
        5.3).
        """
        if self.allowed.expires_after is None:
            return None
        left = self._decided + self.allowed.expires_after - asyncio.get_running_loop().time()
        return max(int(left * 1000), 1)  # 0 would mean: never

    def check(self) -> None:
        """Raises RequestRefused once the right is lost."""
        if self.denied is not None:
            raise self.denied.refusal

    def when_lost(self, end: Callable[[Denied], None]) -> None:
        """Have `end` called when the right is lost, at once if it is."""
        self._end = end
        if self.denied is not None:
            end(self.denied)

    async def watch(self) -> None:
        """Ask again in time, until the right is lost."""
        self.denied = await self.lost()
        if self._end is not None:
            self._end(self.denied)

    async def update(
        self, tokens: Sequence[TokenPair] = (), *, namespace: TrackNamespace | None = None
    ) -> Allowed:
        """A REQUEST_UPDATE came, with `tokens` that replace those of the request if there are any, and
        `namespace` if it has a new prefix. Raises RequestRefused if the policy denies it, then nothing has
        changed; and once the right is lost, since then the end of the request is on its way.
        """
        self.check()
        request = self._request
        if namespace is not None:
            request = replace(request, namespace=namespace)
        change = replace(
            request,
            action=Action.REQUEST_UPDATE,
            updates=request.action,
            tokens=tuple(tokens),
            held_tokens=request.held_tokens if tokens else request.tokens + request.held_tokens,
        )
        decision = await ask(self._policy, change)
        if isinstance(decision, Denied):
            raise decision.refusal
        self.check()
        self._request = replace(request, tokens=tuple(tokens)) if tokens else request
        self._take(decision)
        self._renewed.set()
        return decision

    async def lost(self) -> Denied:
        """Wait until the policy denies what goes on; never returns while it is allowed."""
        while True:
            self._renewed.clear()
            try:
                async with asyncio.timeout(self.allowed.revalidate_after):
                    await self._renewed.wait()
                continue
            except TimeoutError:
                request = self._request
            held = request.tokens + request.held_tokens
            decision = await ask(self._policy, replace(request, tokens=(), held_tokens=held))
            if self._renewed.is_set():
                continue  # An update was allowed meanwhile: this answer is about the tokens before it.
            if isinstance(decision, Denied):
                return decision
            self._take(decision)

    def _take(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self._decided = asyncio.get_running_loop().time()
