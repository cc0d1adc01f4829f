"""Find publications from the tokens alone (kvcs 7.1)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from kvcs.errors import InvalidName
from kvcs.identity import Descriptor, ScopeKey, Tokens, block_keys
from kvcs.names import PublicationName, content_prefix, scope_prefix
from moqt.session import Session
from moqt.subscribing import NamespaceWatch

__all__ = ["DISCOVERY_WAIT", "Found", "discover", "discover_in_scope"]

logger = logging.getLogger(__name__)

DISCOVERY_WAIT: Final = 0.5
"""Seconds for the first NAMESPACE after REQUEST_OK: a namespace subscription never says "there is none" (kvcs
14 #4).
"""

PARALLEL_PREFIXES: Final = 32
"""Prefixes asked for at once."""


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
    `Session.subscribe_namespace` raises.
    """
    keys = block_keys(scope_key, descriptor, tokens)
    for longest in range(len(keys), min_blocks - 1, -PARALLEL_PREFIXES):
        lengths = range(longest, max(longest - PARALLEL_PREFIXES, min_blocks - 1), -1)
        prefixes = [
            content_prefix(scope_key.scope_id, descriptor.compat_id, keys[length - 1]) for length in lengths
        ]
        async with AsyncExitStack() as stack:
            watches = [
                await stack.enter_async_context(watch)
                for watch in await asyncio.gather(*map(session.subscribe_namespace, prefixes))
            ]
            found = await _first(list(zip(lengths, watches, strict=True)), wait)
        if found:
            return found
    return []


async def _first(watches: Sequence[tuple[int, NamespaceWatch]], wait: float) -> list[Found]:
    """What the longest prefix with an answer has; an answer for the longest of all ends the wait."""
    loop = asyncio.get_running_loop()
    end = loop.time() + wait
    pending = {asyncio.ensure_future(anext(watch)): watch for _, watch in watches}
    try:
        while pending and not watches[0][1].namespaces and (left := end - loop.time()) > 0:
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                del pending[task]
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for length, watch in watches:
        found = [Found(name, length) for name in _publications(watch)]
        if found:
            return found
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
    seconds. Raises as `discover` does.
    """
    keys = block_keys(scope_key, descriptor, tokens)
    lengths = {key: index + 1 for index, key in enumerate(keys)}
    async with await session.subscribe_namespace(scope_prefix(scope_key.scope_id)) as watch:
        await asyncio.sleep(wait)
        found = [
            Found(name, lengths[name.anchor_key])
            for name in _publications(watch)
            if name.compat_id == descriptor.compat_id and name.anchor_key in lengths
        ]
    return sorted(found, key=lambda one: -one.blocks)


def _publications(watch: NamespaceWatch) -> list[PublicationName]:
    names = []
    for namespace in watch.namespaces:
        try:
            names.append(PublicationName.from_namespace(namespace))
        except InvalidName as error:
            logger.warning(
                "a namespace that is no KVCS publication was announced, and is ignored: %s", error
            )  # R3.1a
    return names
