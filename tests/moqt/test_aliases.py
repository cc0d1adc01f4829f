"""Tokens and their aliases across the requests of a session (moqt 2.7)."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moqt.authorization import Action
from moqt.errors import (
    RequestCode,
    SessionCode,
)
from moqt.wire import (
    AliasType,
    Fetch,
    Parameters,
    RequestError,
    RequestOk,
    RequestUpdate,
    SetupOptions,
    Subscribe,
    SubscribeOk,
    Token,
    TrackStatus,
)
from tests.moqt.ends import NAME, Peer, Talk, hostile
from tests.moqt.raw import check_closed, check_refused
from tests.moqt.rights import EXPIRED, Script, reply, value, with_token

pytestmark = pytest.mark.virtual


def register(alias: int, text: bytes) -> Token:
    return Token(AliasType.REGISTER, alias, 1, text)


def use(alias: int) -> Token:
    return Token(AliasType.USE_ALIAS, alias)


def delete(alias: int) -> Token:
    return Token(AliasType.DELETE, alias)


async def ask_status(peer: Peer, *tokens: Token) -> Talk:
    return await peer.ask(TrackStatus(peer.id(), NAME, Parameters(tokens=tokens)))


async def test_an_alias_across_requests() -> None:
    """Registered in SETUP or in one request, used in others, deleted, unknown then, registered anew."""
    policy = Script(Action.TRACK_STATUS)
    setup = SetupOptions(tokens=(register(1, b"one"),))
    async with hostile(policy=policy, setup=setup) as (_, peer):
        for tokens, resolved in (
            ((use(1),), ((1, b"one"),)),
            ((register(2, b"two"),), ((1, b"two"),)),
            ((use(1), use(2)), ((1, b"one"), (1, b"two"))),
            ((use(2), delete(2)), ((1, b"two"),)),
            ((register(2, b"three"),), ((1, b"three"),)),
            ((use(2),), ((1, b"three"),)),
        ):
            assert isinstance(await reply(await ask_status(peer, *tokens)), RequestOk)
            assert policy.asked[-1].tokens == resolved
            assert policy.asked[-1].held_tokens == ((1, b"one"),)
        assert isinstance(await reply(await ask_status(peer, delete(1))), RequestOk)
        asked = len(policy.asked)
        await check_refused(await ask_status(peer, use(1)), RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS)
        assert len(policy.asked) == asked


async def test_an_alias_means_what_it_meant_when_the_request_came() -> None:
    """Not what another request made of it while the policy was thinking."""
    policy = Script(Action.TRACK_STATUS, takes=2)
    async with hostile(policy=policy, setup=SetupOptions(tokens=(register(1, b"old"),))) as (_, peer):
        first = await ask_status(peer, use(1))
        await asyncio.sleep(0.5)
        second = await ask_status(peer, delete(1), register(1, b"new"))
        await asyncio.sleep(2.5)
        assert isinstance(await reply(first), RequestOk)
        assert isinstance(await reply(second), RequestOk)
        assert [asked.tokens for asked in policy.asked[1:]] == [((1, b"old"),), ((1, b"new"),)]


async def test_a_register_counts_in_whatever_is_rejected() -> None:
    """In a request that is denied, in an update that is denied, and in one that comes too late."""
    policy = Script(Action.SUBSCRIBE, Action.TRACK_STATUS)
    async with hostile(policy=policy) as (_, peer):
        denied = await peer.ask(Fetch(peer.id(), NAME, Parameters(tokens=(register(1, b"one"),))))
        await check_refused(denied, RequestCode.UNAUTHORIZED)
        await denied.say(RequestUpdate(peer.id(), Parameters(tokens=(register(2, b"two"), use(9)))))
        running = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await reply(running), SubscribeOk)
        await running.say(
            RequestUpdate(peer.id(), Parameters(tokens=(register(3, b"three"),))),
            RequestUpdate(peer.id(), Parameters(tokens=(register(4, b"four"),))),
        )
        assert isinstance(await reply(running), RequestError)
        await asyncio.sleep(1)
        assert isinstance(await reply(await ask_status(peer, *map(use, range(1, 5)))), RequestOk)
        assert policy.asked[-1].tokens == ((1, b"one"), (1, b"two"), (1, b"three"), (1, b"four"))


async def test_an_alias_of_a_token_that_has_expired_stays() -> None:
    """Until it is deleted: it still can be, and it can't be registered again before."""
    policy = Script(Action.TRACK_STATUS)
    async with hostile(policy=policy) as (session, peer):
        assert isinstance(await reply(await ask_status(peer, register(1, b"one"))), RequestOk)
        policy.denied = EXPIRED
        for _ in range(2):
            await check_refused(await ask_status(peer, use(1)), RequestCode.EXPIRED_AUTH_TOKEN)
        assert policy.asked[-1].tokens == ((1, b"one"),)
        policy.denied = None
        assert isinstance(await reply(await ask_status(peer, delete(1), register(1, b"two"))), RequestOk)
        await ask_status(peer, register(1, b"three"))
        await check_closed(session, peer, SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS)


async def test_no_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """However it came, and whatever is wrong with it."""
    caplog.set_level(logging.DEBUG)
    policy = Script(*set(Action) - {Action.FETCH})
    async with hostile(policy=policy, setup=SetupOptions(tokens=(register(1, b"hush-1"),))) as (
        session,
        peer,
    ):
        await reply(await ask_status(peer, value(b"hush-2"), register(2, b"hush-3")))
        await reply(await peer.ask(Fetch(peer.id(), NAME, with_token(b"hush-4"))))
        running = await peer.ask(Subscribe(peer.id(), NAME, Parameters(tokens=(use(2),))))
        await reply(running)
        policy.denied = EXPIRED
        await running.say(RequestUpdate(peer.id(), with_token(b"hush-5")))
        await reply(running)
        await ask_status(peer, value(b"hush-6"), value(b"hush-6"))
        await check_closed(session, peer, SessionCode.PROTOCOL_VIOLATION)
    assert "FETCH denied" in caplog.text
    assert "hush" not in caplog.text
    assert b"hush".hex() not in caplog.text
