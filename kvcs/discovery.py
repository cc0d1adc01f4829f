"""Find publications from the tokens alone (kvcs 7.1)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kvcs.errors import InvalidName
from kvcs.identity import Descriptor, ScopeKey, Tokens, block_keys
from kvcs.names import PublicationName, content_prefix, scope_prefix
from moqt.errors import MoqtError, RequestCode, RequestRejected
from moqt.names import TrackNamespace
from moqt.session import Session
from moqt.subscribing import NamespaceWatch

__all__ = ["DISCOVERY_WAIT", "Found", "discover", "discover_in_scope"]

logger = logging.getLogger(__name__)

DISCOVERY_WAIT: Final = 0.5
"""Seconds for the first NAMESPACE after REQUEST_OK: a namespace subscription never says "there is none" (kvcs
14 #4).
"""

MORE_WAIT: Final = 0.005
"""Seconds for further publications of the longest prefix, after the first."""

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
    14 #4). Each round takes `wait` seconds at most, and a round trip. Raises InvalidTokens, and what
    `Session.subscribe_namespace` raises when no prefix of a round can be asked for.
    """
    keys = block_keys(scope_key, descriptor, tokens)
    for longest in range(len(keys), min_blocks - 1, -PARALLEL_PREFIXES):
        lengths = range(longest, max(longest - PARALLEL_PREFIXES, min_blocks - 1), -1)
        prefixes = [
            content_prefix(scope_key.scope_id, descriptor.compat_id, keys[length - 1]) for length in lengths
        ]
        news = asyncio.Event()
        async with _asking(session, prefixes, news) as questions:
            await _first_answer(questions, news, wait)
            for length, question in zip(lengths, questions, strict=True):
                if question.names:
                    return [Found(name, length) for name in question.names]
            errors = [question.error for question in questions if question.error is not None]
            if len(errors) == len(questions):
                raise errors[0]
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
    keys = block_keys(scope_key, descriptor, tokens)
    lengths = {key: index + 1 for index, key in enumerate(keys)}
    news = asyncio.Event()
    async with _asking(session, [scope_prefix(scope_key.scope_id)], news) as (question,):
        while not question.settled:
            news.clear()
            await news.wait()
        if question.error is None:
            await asyncio.sleep(wait)
        if question.error is not None:
            raise question.error
        found = [
            Found(name, lengths[name.anchor_key])
            for name in question.names
            if name.compat_id == descriptor.compat_id and name.anchor_key in lengths
        ]
    return sorted(found, key=lambda one: -one.blocks)


class _Question:
    """A prefix that is asked for: `names` are the publications under it, as far as they are known.

    `settled` tells that the question was accepted, or failed with `error`; `news` is set with every change.
    """

    def __init__(self, session: Session, prefix: TrackNamespace, news: asyncio.Event) -> None:
        self.names: list[PublicationName] = []
        self.settled = False
        self.error: MoqtError | None = None
        self._session = session
        self._prefix = prefix
        self._news = news

    async def ask(self) -> None:
        """Ask, and note the answers until cancelled."""
        try:
            async with await self._subscribe() as watch:
                self.settled = True
                self._news.set()
                async for _event in watch:
                    self.names = _publications(watch)
                    self._news.set()
        except MoqtError as error:
            logger.info("a namespace prefix: %s", error)
            self.names = []  # moqt 11: they are gone with the subscription.
            self.error = error
        finally:
            self.settled = True
            self._news.set()

    async def _subscribe(self) -> NamespaceWatch:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._session.limits.reply_deadline
        while True:
            try:
                return await self._session.subscribe_namespace(self._prefix)
            except RequestRejected as rejection:
                # Another search in this session goes on, or the peer has not heard of its end.
                if rejection.code != RequestCode.PREFIX_OVERLAP or loop.time() >= end:
                    raise
            await asyncio.sleep(OVERLAP_PAUSE)


@asynccontextmanager
async def _asking(
    session: Session, prefixes: Sequence[TrackNamespace], news: asyncio.Event
) -> AsyncIterator[list[_Question]]:
    questions = [_Question(session, prefix, news) for prefix in prefixes]
    tasks = [asyncio.create_task(question.ask()) for question in questions]
    try:
        yield questions
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def _first_answer(questions: Sequence[_Question], news: asyncio.Event, wait: float) -> None:
    """Wait until the first question, which is for the longest prefix, has an answer, but `wait` seconds at
    most after all are accepted.
    """
    end: float | None = None
    while not questions[0].names:
        if end is None and all(question.settled for question in questions):
            end = asyncio.get_running_loop().time() + wait
        if all(question.error is not None for question in questions):
            return
        news.clear()
        try:
            async with asyncio.timeout_at(end):
                await news.wait()
        except TimeoutError:
            return
    await asyncio.sleep(MORE_WAIT)


def _publications(watch: NamespaceWatch) -> list[PublicationName]:
    names = []
    for namespace in watch.namespaces:
        try:
            names.append(PublicationName.from_namespace(namespace))
        except InvalidName as error:  # kvcs 3.1
            logger.warning("a namespace that names no publication is ignored: %s", error)
    return names
