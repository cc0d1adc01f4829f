"""A session asks its policy before it does what its peer wants (moqt 2.7, security 3.2)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.errors import (
    DoneCode,
    RequestCode,
    ResetCode,
    SessionClosed,
    SessionCode,
)
from moqt.limits import Limits
from moqt.track import Track
from moqt.wire import (
    Fetch,
    FetchOk,
    Message,
    Namespace,
    Parameters,
    PublishDone,
    RequestError,
    RequestOk,
    RequestUpdate,
    SetupOptions,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    encode,
)
from tests.moqt.ends import NAME, NAMESPACE, Talk, hostile, publish, tables_of
from tests.moqt.raw import check_closed, check_refused, unset
from tests.moqt.rights import (
    EXPIRED,
    NARROW,
    NOWHERE,
    REPLIES,
    RESERVED,
    WANTED,
    WHOLE,
    Script,
    Watched,
    data_stream,
    drained,
    each_action,
    everything,
    long_track,
    now,
    reply,
    value,
    with_token,
)

pytestmark = pytest.mark.virtual


# Before anything is looked up.


@pytest.mark.requirement("R10d")
@each_action
@pytest.mark.parametrize("takes", [0.0, 0.3])
async def test_without_the_right_the_answer_tells_nothing(action: Action, takes: float) -> None:
    """Bytes and time are the same whether the thing exists or not, and nothing was looked up. The policy
    has heard all that it needs.
    """
    policy, tracks = Script(takes=takes), Watched()
    track = Track(NAME, one_subgroup=True)
    publish(track, (0, 0))
    setup = SetupOptions(tokens=(value(b"s"),))
    async with hostile(track=track, tracks=tracks, policy=policy, setup=setup) as (session, peer):
        tracks.announce(NAMESPACE)
        await asyncio.sleep(1)
        tracks.touched.clear()
        answers, times = [], []
        for wanted in (NAME, NOWHERE, RESERVED):
            before = now()
            talk = await peer.ask(WANTED[action](peer.id(), wanted, with_token(b"a", b"b")), fin=True)
            answers.append(await everything(talk.stream))
            times.append(now() - before)
            asked = policy.asked.pop()
            assert (asked.action, asked.namespace) == (action, wanted.namespace)
            assert asked.name == (None if "NAMESPACE" in action.name or "TRACKS" in action.name else b"k0")
            assert (asked.tokens, asked.held_tokens) == (((1, b"a"), (1, b"b")), ((1, b"s"),))
            assert (asked.session, asked.peer) == (session.connection.id, session.connection.peer)
        denied = encode(RequestError(RequestCode.UNAUTHORIZED, 0, "not authorized", None))
        assert answers == [denied] * 3
        assert times == pytest.approx([times[0]] * 3)
        assert times[0] >= takes
        assert tracks.touched == []
        assert session.peer_namespaces == {}
        await asyncio.sleep(10)
        assert set(tables_of(session).values()) == {0}


@pytest.mark.requirement("R10d")
@each_action
async def test_each_action_needs_its_own_right(action: Action) -> None:
    """With exactly that right it is done; with all others it is not."""
    track = Track(NAME, one_subgroup=True)
    publish(track, (0, 0))
    only = Script(action)
    async with hostile(track=track, policy=only) as (_, peer):
        talk = await peer.ask(WANTED[action](peer.id(), NAME, Parameters()))
        answer = await reply(talk)
        if action in REPLIES:
            assert isinstance(answer, REPLIES[action])
        else:  # What becomes of these is no matter of rights.
            assert not (isinstance(answer, RequestError) and answer.code == RequestCode.UNAUTHORIZED)
        assert [asked.action for asked in only.asked] == [Action.SETUP, action]
    others = Script(*set(Action) - {action})
    async with hostile(track=Track(NAME), policy=others) as (_, peer):
        talk = await peer.ask(WANTED[action](peer.id(), NAME, Parameters()))
        await check_refused(talk, RequestCode.UNAUTHORIZED)


@pytest.mark.parametrize("code", [RequestCode.MALFORMED_AUTH_TOKEN, RequestCode.EXPIRED_AUTH_TOKEN])
@each_action
async def test_what_is_wrong_with_a_token_is_said(action: Action, code: RequestCode) -> None:
    policy = Script(*Action)
    async with hostile(policy=policy) as (_, peer):
        policy.denied = Denied(code, "look at it")
        talk = await peer.ask(WANTED[action](peer.id(), NAME, with_token(b"x")))
        assert (await check_refused(talk, code)).reason == "look at it"


async def test_a_policy_that_fails_or_does_not_answer_denies(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def decide(self, request: AccessRequest) -> Decision:
            if request.action is Action.FETCH:
                raise OSError("no database")
            await asyncio.sleep(3600 if request.action is Action.SUBSCRIBE else 0)
            return Allowed()

    async with hostile(policy=Broken()) as (_, peer):
        await check_refused(await peer.ask(Fetch(peer.id(), NAME)), RequestCode.INTERNAL_ERROR)
        before = now()
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        await asyncio.sleep(4.9)
        await check_refused(talk, RequestCode.TIMEOUT)
        assert now() - before < 5.2
        await peer.alive()
    assert "the policy failed for FETCH" in caplog.text


# SETUP.


@pytest.mark.parametrize(
    ("denied", "code"),
    [
        (Denied(), SessionCode.UNAUTHORIZED),
        (EXPIRED, SessionCode.EXPIRED_AUTH_TOKEN),
        (Denied(RequestCode.MALFORMED_AUTH_TOKEN, "no"), SessionCode.MALFORMED_AUTH_TOKEN),
    ],
)
@pytest.mark.parametrize("peer_dials", [True, False])
async def test_a_setup_that_is_denied(denied: Denied, code: SessionCode, peer_dials: bool) -> None:
    """The session ends, and what was asked before the decision is not answered."""
    policy = Script(takes=1)
    policy.denied = denied
    async with unset(peer_dials=peer_dials, policy=policy) as (starting, session, peer):
        talk = await peer.ask(TrackStatus(peer.id(), NAME))
        await peer.set_up(SetupOptions(tokens=(value(b"s"),)))
        with pytest.raises(SessionClosed) as caught:
            await starting
        assert caught.value.code == code
        await check_closed(session, peer, code)
        with pytest.raises(Exception, match=r"closed|reset"):
            await everything(talk.stream)
        assert [asked.action for asked in policy.asked] == [Action.SETUP]
        assert policy.asked[0].tokens == ((1, b"s"),)


async def test_a_decision_about_setup_that_does_not_come() -> None:
    policy = Script(takes=3600)
    async with unset(policy=policy) as (starting, _, peer):
        await peer.set_up()
        with pytest.raises(Exception, match="SETUP"):
            await starting
        await asyncio.sleep(0.1)
        assert policy.pending == 0


async def test_requests_wait_for_the_decision_about_setup() -> None:
    policy = Script(Action.TRACK_STATUS, takes=1)
    async with unset(policy=policy) as (starting, _, peer):
        talk = await peer.ask(TrackStatus(peer.id(), NAME), fin=True)
        await asyncio.sleep(1)
        assert policy.asked == []
        await peer.set_up()
        await asyncio.sleep(0.9)
        assert not starting.done()
        assert [asked.action for asked in policy.asked] == [Action.SETUP]
        await starting
        await asyncio.sleep(1)
        await check_refused(talk, RequestCode.DOES_NOT_EXIST)


async def test_a_session_that_ends_while_it_is_decided() -> None:
    """Nothing is left of requests and updates that the policy thinks about."""
    policy = Script(*Action)
    async with hostile(policy=policy) as (session, peer):
        running = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await reply(running), SubscribeOk)
        policy.takes = 3
        await running.say(RequestUpdate(peer.id()))
        await peer.ask(Subscribe(peer.id(), NAME))
        await asyncio.sleep(1)
        assert policy.pending == 2
        await session.close()
        assert policy.pending == 0
        assert set(tables_of(session).values()) == {0}


# REQUEST_UPDATE.


@pytest.mark.parametrize(
    ("action", "more"),
    [
        (Action.SUBSCRIBE, {"subscriber_priority": 3}),
        (Action.FETCH, {"subscriber_priority": 3}),
        (Action.PUBLISH_NAMESPACE, {}),
        (Action.SUBSCRIBE_NAMESPACE, {"prefix": (b"elsewhere",)}),
    ],
)
@pytest.mark.parametrize("right", [True, False])
async def test_updates_need_a_right_too(action: Action, more: dict[str, Any], right: bool) -> None:
    policy = Script(action, *([Action.REQUEST_UPDATE] if right else []))
    async with hostile(track=long_track(), policy=policy, client=NARROW) as (session, peer):
        talk = await peer.ask(WANTED[action](peer.id(), NAME, with_token(b"old")))
        assert isinstance(await reply(talk), REPLIES[action])
        await talk.say(RequestUpdate(peer.id(), Parameters(tokens=(value(b"new"),), **more)))
        answer = await reply(talk)
        asked = policy.asked[-1]
        assert (asked.action, asked.updates) == (Action.REQUEST_UPDATE, action)
        assert asked.tokens == ((1, b"new"),)
        assert asked.namespace == more.get("prefix", NAMESPACE)
        if right:
            assert isinstance(answer, RequestOk)
            return
        assert isinstance(answer, RequestError)
        assert answer.code == RequestCode.UNAUTHORIZED
        # moqt 4.2: a request whose update fails is over.
        last = await reply(talk)
        if action is Action.SUBSCRIBE:
            assert isinstance(last, PublishDone)
            assert last.status == DoneCode.UPDATE_FAILED
            last = await reply(talk)
        assert last is None
        await talk.say(fin=True)
        await asyncio.sleep(1)
        assert session.peer_namespaces == {}
        assert set(tables_of(session).values()) == {0}


async def test_a_new_prefix_that_is_denied_is_not_looked_at() -> None:
    class OnePrefix:
        async def decide(self, request: AccessRequest) -> Decision:
            return Allowed() if request.namespace in ((), NAMESPACE) else Denied()

    tracks = Watched()
    async with hostile(tracks=tracks, policy=OnePrefix()) as (_, peer):
        tracks.announce(NAMESPACE)
        tracks.announce((b"secret", b"one"))
        talk = await peer.ask(SubscribeNamespace(peer.id(), NAMESPACE))
        assert [await reply(talk), await reply(talk)] == [RequestOk(), Namespace(())]
        tracks.touched.clear()
        await talk.say(RequestUpdate(peer.id(), Parameters(prefix=(b"secret",))))
        assert isinstance(await reply(talk), RequestError)
        assert await reply(talk) is None
        await asyncio.sleep(1)
        assert tracks.touched == ["wanted"]  # The old prefix is no longer.


async def test_updates_of_one_request_stay_in_order_and_its_data_goes_on() -> None:
    """Each waits for the decision about the one before; the Objects of the subscription do not."""
    policy = Script(*Action)
    track = Track(NAME, one_subgroup=True)
    async with hostile(track=track, policy=policy) as (_, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await reply(talk), SubscribeOk)
        policy.takes = 2
        await talk.say(*(RequestUpdate(peer.id(), with_token(b"%d" % number)) for number in range(3)))
        await asyncio.sleep(0.5)
        assert policy.pending == 1
        publish(track, (0, 0))
        await asyncio.sleep(0.1)
        while (stream := await peer.connection.accept()).bidirectional or not await stream.read():
            pass
        for _ in range(3):
            await asyncio.sleep(1.8)
            assert isinstance(await reply(talk), RequestOk)
        assert [asked.tokens for asked in policy.asked[-3:]] == [
            ((1, b"%d" % number),) for number in range(3)
        ]


async def test_a_request_that_is_cancelled_while_its_update_is_decided() -> None:
    """Its streams are reset at once (moqt 3.4), and the update has no effect."""
    policy = Script(*Action)
    track = long_track()
    async with hostile(track=track, policy=policy, client=NARROW) as (session, peer):
        fill = Parameters(location_filter=WHOLE, fill=Parameters(location_filter=WHOLE))
        talk = await peer.ask(Subscribe(peer.id(), NAME, fill))
        assert isinstance(await reply(talk), SubscribeOk)
        assert session.publishing._subscriptions
        policy.takes = 4
        await talk.say(RequestUpdate(peer.id()))
        await asyncio.sleep(0.5)
        talk.stream.stop(ResetCode.CANCELLED)
        await asyncio.sleep(0.2)
        assert policy.pending == 0
        assert not session.publishing._subscriptions


async def test_a_fetch_that_ends_while_its_update_is_decided() -> None:
    """The update is not answered: its time is over (moqt 3.4)."""
    policy = Script(*Action)
    async with hostile(track=long_track(), policy=policy, client=NARROW) as (_, peer):
        talk = await peer.ask(Fetch(peer.id(), NAME, Parameters(location_filter=WHOLE)))
        assert isinstance(await reply(talk), FetchOk)
        policy.takes = 4
        await talk.say(RequestUpdate(peer.id()))
        await asyncio.sleep(0.5)
        assert policy.pending == 1
        assert (await drained(await data_stream(peer)))[1] is None
        assert await reply(talk) is None
        assert policy.pending == 0


# Many at once.


async def test_pending_decisions_are_bounded() -> None:
    """By the limit of requests; what is above it is refused without asking the policy."""
    policy = Script(*Action, takes=3)
    async with hostile(policy=policy, limits=Limits(max_requests=10)) as (session, peer):
        await asyncio.sleep(1)
        policy.asked.clear()
        talks = [await peer.ask(TrackStatus(peer.id(), NAME)) for _ in range(40)]
        await asyncio.sleep(1)
        assert policy.pending == 10
        assert len(policy.asked) == 10
        for talk in talks:  # Leaving does not make room for more questions than that.
            talk.stream.stop(ResetCode.CANCELLED)
            talk.stream.reset(ResetCode.CANCELLED)
        more = [await peer.ask(TrackStatus(peer.id(), NAME)) for _ in range(40)]
        await asyncio.sleep(1)
        assert policy.pending <= 10
        for talk in more:
            await check_refused(talk, RequestCode.EXCESSIVE_LOAD)
            await talk.say(fin=True)
        await asyncio.sleep(10)
        assert isinstance(await reply_of(await peer.ask(TrackStatus(peer.id(), NAME))), RequestOk)
        assert session.serving <= 1


async def reply_of(talk: Talk) -> Message | None:
    async with asyncio.timeout(5):
        return await talk.next()


async def test_unanswered_updates_are_bounded_while_one_is_decided() -> None:
    """moqt 20 #18, once they are looked at."""
    policy = Script(*Action)
    async with hostile(policy=policy, limits=Limits(max_request_updates=4)) as (session, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await reply(talk), SubscribeOk)
        policy.takes = 2
        await talk.say(*(RequestUpdate(peer.id()) for _ in range(5)))
        await check_closed(session, peer, SessionCode.TOO_MANY_REQUEST_UPDATES)


async def test_a_slow_decision_holds_up_nobody_else() -> None:
    class Slow(Script):
        async def decide(self, request: AccessRequest) -> Decision:
            self.takes = 4 if request.action is Action.SUBSCRIBE else 0
            return await super().decide(request)

    async with hostile(policy=Slow(*Action)) as (_, peer):
        slow = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await reply(await peer.ask(TrackStatus(peer.id(), NAME))), RequestOk)
        await asyncio.sleep(3.5)
        assert isinstance(await reply(slow), SubscribeOk)
