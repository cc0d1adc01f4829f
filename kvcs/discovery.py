"""Find publications from the tokens alone (kvcs 7.1)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvcs.errors import InvalidName
from kvcs.identity import Descriptor, ScopeKey, Tokens, block_keys
from kvcs.names import PublicationName, content_prefix, scope_prefix
from kvcs.progress import insist
from moqt.errors import DeadlineExceeded, MoqtError, RequestCode, RequestRejected
from moqt.names import TrackNamespace
from moqt.namespaces import NamespaceEvent, NamespaceWatch
from moqt.session import Session

__all__ = ["DISCOVERY_WAIT", "Found", "discover", "discover_in_scope"]

logger = logging.getLogger(__name__)

DISCOVERY_WAIT: Final = 0.5
"""Seconds for the first NAMESPACE after REQUEST_OK: a namespace subscription never says "there is none" (kvcs
14 #4).
"""

HEAD_START: Final = 0.1
"""Seconds by which the longest prefix is asked for before all others, unless the peer answers sooner: where
it is published, they need not be asked for. Layer 0 then comes sooner, and a relay that many consumers ask at
once has a fraction of the requests.
"""

ANSWER_WAIT: Final = 0.005
"""Seconds for the longest prefix's first NAMESPACE, once it is accepted, before the others are asked for."""

MORE_WAIT: Final = 0.0005
"""Seconds for further publications of the longest prefix, after the first."""

QUIET: Final = 0.1
"""Seconds without a further publication after which a scope is taken to have told all of interest."""

PARALLEL_PREFIXES: Final = 32
"""Prefixes asked for at once."""

OVERLAP_PAUSE: Final = 0.05
"""Seconds before a prefix is asked for again while the session still asks for an overlapping one (moqt 11).
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A publication whose segment 0 covers the first `blocks` blocks of the tokens that were looked for."""

    name: PublicationName
    blocks: int


async def discover(
    session: Session,
    descriptor: Descriptor,
    scope_key: ScopeKey,
    tokens: Tokens,
    *,
    min_blocks: int = 1,
    wait: float = DISCOVERY_WAIT,
) -> list[Found]:
    """The publications of the longest prefix of `tokens` that has any, in the order announced; [] if there is
    none.

    Shorter prefixes are asked for when longer ones have none, down to `min_blocks` blocks, many at once (kvcs
    14 #4). Where there are more than PARALLEL_PREFIXES, one question for the whole scope takes their place;
    when the peer denies that, each such number of prefixes is a round of its own. A round takes `wait`
    seconds at most, two round trips and ANSWER_WAIT; so does the scope. Raises InvalidTokens, and what
    `Session.subscribe_namespace` raises when the peer lets us ask for no prefix of a round.
    """
    keys = block_keys(scope_key, descriptor, tokens)
    prefixes = [content_prefix(scope_key.scope_id, descriptor.compat_id, key) for key in keys]
    if len(keys) - min_blocks >= PARALLEL_PREFIXES:
        async with _Search(session, prefixes[-1:]) as search:
            await search.first_answer(ANSWER_WAIT)
            if search.questions[0].names:
                return [Found(name, len(keys)) for name in search.questions[0].names]
        try:
            found = await _in_scope(session, descriptor, scope_key, keys, wait, until_quiet=True)
        except MoqtError as error:
            logger.info("prefixes are asked for one by one, since the scope can't be: %s", error)
        else:
            most = max((one.blocks for one in found), default=0)
            return [one for one in found if one.blocks == max(most, min_blocks)]
    for longest in range(len(keys), min_blocks - 1, -PARALLEL_PREFIXES):
        lengths = range(longest, max(longest - PARALLEL_PREFIXES, min_blocks - 1), -1)
        async with _Search(session, [prefixes[length - 1] for length in lengths]) as search:
            await search.first_answer(wait)
            for length, question in zip(lengths, search.questions, strict=True):
                if question.names:
                    return [Found(name, length) for name in question.names]
    return []


async def discover_in_scope(
    session: Session,
    descriptor: Descriptor,
    scope_key: ScopeKey,
    tokens: Tokens,
    *,
    wait: float = DISCOVERY_WAIT,
) -> list[Found]:
    """All publications of prefixes of `tokens`, longest first, by one subscription to the whole scope (kvcs
    3.1).

    One request however long the prompt, but the peer tells of every publication of the scope. Takes `wait`
    seconds and a round trip. Raises as `discover` does.
    """
    return await _in_scope(session, descriptor, scope_key, block_keys(scope_key, descriptor, tokens), wait)


async def _in_scope(
    session: Session,
    descriptor: Descriptor,
    scope_key: ScopeKey,
    keys: Sequence[bytes],
    wait: float,
    *,
    until_quiet: bool = False,
) -> list[Found]:
    """`discover_in_scope`. With `until_quiet` it ends when there is something, and no more has come for QUIET
    seconds.
    """
    lengths = {key: index + 1 for index, key in enumerate(keys)}

    def ours(name: PublicationName) -> bool:
        return name.compat_id == descriptor.compat_id and name.anchor_key in lengths

    async with _Search(session, [scope_prefix(scope_key.scope_id)], ours) as search:
        await search.answers(wait, until_quiet=until_quiet)
        found = [Found(name, lengths[name.anchor_key]) for name in search.questions[0].names]
    return sorted(found, key=lambda one: -one.blocks)


class _Search:
    """Several prefixes that are asked for at once, as long as the `async with` block."""

    def __init__(
        self,
        session: Session,
        prefixes: Sequence[TrackNamespace],
        ours: Callable[[PublicationName], bool] = lambda _name: True,
    ) -> None:
        self._news = asyncio.Event()
        self._deadline = session.limits.reply_deadline
        self.questions = [_Question(session, prefix, self._news, ours) for prefix in prefixes]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> _Search:
        self._tasks = [asyncio.create_task(self.questions[0].ask()), asyncio.create_task(self._ask_others())]
        return self

    async def _ask_others(self) -> None:
        first = self.questions[0]
        await self._until(lambda: first.accepted or first.error is not None, HEAD_START)
        await asyncio.sleep(ANSWER_WAIT)
        self._tasks += [asyncio.create_task(question.ask()) for question in self.questions[1:]]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def first_answer(self, wait: float) -> None:
        """Wait until the first question, which is for the longest prefix, has an answer, but for `wait`
        seconds at most once the peer has accepted all. Raises what went wrong if it accepted none.
        """
        first = self.questions[0]
        await self._until(lambda: bool(first.names) or self._settled(), self._deadline)
        if await self._until(lambda: bool(first.names) or self._given_up(), wait):
            await asyncio.sleep(MORE_WAIT)
        self._check()

    async def answers(self, wait: float, *, until_quiet: bool) -> None:
        """Wait for `wait` seconds once the peer has accepted the one question, or, `until_quiet`, no longer
        than for answers after which none came for QUIET seconds. Raises as `first_answer` does.
        """
        names = self.questions[0].names
        await self._until(self._settled, self._deadline)
        await self._until(lambda: self._given_up() or (until_quiet and bool(names)), wait)
        known = 0
        while until_quiet and len(names) > known:
            known = len(names)
            await asyncio.sleep(QUIET)
        self._check()

    def _settled(self) -> bool:
        return all(question.accepted or question.given_up for question in self.questions)

    def _given_up(self) -> bool:
        return all(question.given_up for question in self.questions)

    def _check(self) -> None:
        if not any(question.accepted for question in self.questions):
            raise self.questions[0].error or DeadlineExceeded("discovery", self._deadline)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for `condition`, no longer than so many seconds; whether it holds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        return condition()


class _Question:
    """A prefix that is asked for: `names` are the publications under it that are `ours`, as far as they are
    known.

    It is `accepted` by the peer, or not yet, or was given up because of `error`; `news` is set with every
    change.
    """

    def __init__(
        self,
        session: Session,
        prefix: TrackNamespace,
        news: asyncio.Event,
        ours: Callable[[PublicationName], bool],
    ) -> None:
        self.names: list[PublicationName] = []
        self.accepted = False
        self.given_up = False
        self.error: Exception | None = None
        self._session = session
        self._prefix = prefix
        self._news = news
        self._ours = ours
        self._events = 0

    async def ask(self) -> None:
        """Ask, and note the answers until cancelled."""
        try:
            await insist(self._follow, lambda: self._events, self._note)
        except MoqtError as error:
            self._note(error)
        finally:
            self.given_up = True
            self._news.set()

    async def _follow(self) -> bool:
        async with await self._subscribe() as watch:
            self.accepted = True
            self._news.set()
            async for event in watch:
                self._events += 1
                self._take(event)
                self._news.set()
        return False

    async def _subscribe(self) -> NamespaceWatch:
        while True:
            try:
                return await self._session.subscribe_namespace(self._prefix)
            except RequestRejected as rejection:
                # Another search in this session goes on, or the peer has not heard of its end.
                if rejection.code != RequestCode.PREFIX_OVERLAP:
                    raise
                self._note(rejection)
            await asyncio.sleep(OVERLAP_PAUSE)

    def _take(self, event: NamespaceEvent) -> None:
        try:
            name = PublicationName.from_namespace(event.namespace)
        except InvalidName as error:  # kvcs 3.1
            logger.warning("a namespace that names no publication is ignored: %s", error)
            return
        if self._ours(name):
            (self.names.append if event.present else self.names.remove)(name)

    def _note(self, error: Exception) -> None:
        logger.info("a namespace prefix: %s", error)
        self.accepted = False
        self.names.clear()  # moqt 11: they are gone with the subscription.
        self.error = error
        self._news.set()
