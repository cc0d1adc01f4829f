"""A right is needed as long as what it is for goes on (moqt 5.3, security 3.2)."""

from __future__ import annotations

import asyncio

import pytest

from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.errors import (
    DoneCode,
    RequestCode,
    ResetCode,
)
from moqt.filters import Location, LocationFilter
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import (
    Fetch,
    FetchOk,
    Parameters,
    PublishDone,
    PublishNamespace,
    Request,
    RequestOk,
    RequestUpdate,
    SetupOptions,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
)
from tests.moqt.ends import NAME, NAMESPACE, Peer, hostile, publish, tables_of
from tests.moqt.raw import check_refused
from tests.moqt.rights import (
    EXPIRED,
    NARROW,
    REPLIES,
    WANTED,
    WHOLE,
    Script,
    Slow,
    Watched,
    data_stream,
    drained,
    long_track,
    now,
    reply,
    value,
    with_token,
)

pytestmark = pytest.mark.virtual


# While it goes on.


@pytest.mark.requirement("R10d")
@pytest.mark.parametrize(
    ("denied", "done"),
    [
        (EXPIRED, DoneCode.EXPIRED),
        (Denied(), DoneCode.UNAUTHORIZED),
        (Denied(RequestCode.TIMEOUT, "?"), DoneCode.INTERNAL_ERROR),
    ],
)
async def test_a_subscription_ends_with_its_right(denied: Denied, done: DoneCode) -> None:
    """PUBLISH_DONE says why; the open Subgroup and the fill in progress are reset, and nothing more comes.
    Another subscription of the same session goes on.
    """

    class Policy(Script):
        async def decide(self, request: AccessRequest) -> Decision:
            loses = request.held_tokens or request.tokens == ((1, b"short"),)
            return await super().decide(request) if loses else Allowed()

    policy = Policy(Action.SUBSCRIBE)
    track = long_track()
    async with hostile(track=track, policy=policy, client=NARROW) as (session, peer):
        fill = Parameters(fill=Parameters(location_filter=WHOLE), tokens=(value(b"short"),))
        talk = await peer.ask(Subscribe(peer.id(), NAME, fill))
        other = await peer.ask(Subscribe(peer.id(), NAME))
        ok, other_ok = await reply(talk), await reply(other)
        assert isinstance(ok, SubscribeOk)
        assert isinstance(other_ok, SubscribeOk)
        filling = await data_stream(peer)
        publish(track, (20, 0))
        await asyncio.sleep(25)
        publish(track, (20, 1))
        policy.denied = denied
        await asyncio.sleep(4)
        assert session.publishing._subscriptions
        await asyncio.sleep(2)
        publish(track, (20, 2))
        message = await reply(talk)
        assert isinstance(message, PublishDone)
        assert (message.status, message.stream_count) == (done, 2)
        assert await reply(talk) is None
        assert (await drained(filling))[1] == ResetCode.EXPIRED_AUTH_TOKEN
        assert (await drained(await data_stream(peer)))[1] == ResetCode.EXPIRED_AUTH_TOKEN
        (delivery,) = session.publishing._subscriptions
        assert delivery.alias == other_ok.track_alias
        live = await data_stream(peer)
        assert (await drained(live))[1] == -1  # Open still.
        publish(track, (20, 3))
        assert (await drained(live))[0] > 0


async def test_an_open_subgroup_is_reset_with_the_right() -> None:
    policy = Script(Action.SUBSCRIBE)
    track = Track(NAME, one_subgroup=True)
    async with hostile(track=track, policy=policy) as (session, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        assert isinstance(await reply(talk), SubscribeOk)
        publish(track, (0, 0), (0, 1))
        stream = await data_stream(peer)
        policy.denied = EXPIRED
        await asyncio.sleep(31)
        assert (await drained(stream))[1] == ResetCode.EXPIRED_AUTH_TOKEN
        message = await reply(talk)
        assert isinstance(message, PublishDone)
        assert (message.status, message.stream_count) == (DoneCode.EXPIRED, 1)
        await talk.say(fin=True)
        await asyncio.sleep(1)
        assert set(tables_of(session).values()) == {0}
        assert not track._watchers


async def test_a_subscription_that_was_ending_anyway_ends_with_its_right() -> None:
    """The Track has ended, but the peer does not take the rest: it never gets it, and is told why."""
    policy, tracks = Script(Action.SUBSCRIBE), Tracks()
    track = long_track()
    async with hostile(track=track, tracks=tracks, policy=policy, client=NARROW) as (_, peer):
        fill = Parameters(fill=Parameters(location_filter=WHOLE))
        talk = await peer.ask(Subscribe(peer.id(), NAME, fill))
        assert isinstance(await reply(talk), SubscribeOk)
        tracks.remove(NAME, DoneCode.TRACK_ENDED)
        policy.denied = EXPIRED
        await asyncio.sleep(31)
        message = await reply(talk)
        assert isinstance(message, PublishDone)
        assert message.status == DoneCode.EXPIRED


@pytest.mark.requirement("R10d")
async def test_a_fetch_ends_with_its_right() -> None:
    policy = Script(Action.FETCH)
    track = long_track()
    async with hostile(track=track, policy=policy, client=NARROW) as (session, peer):
        talk = await peer.ask(Fetch(peer.id(), NAME, Parameters(location_filter=WHOLE)))
        assert isinstance(await reply(talk), FetchOk)
        stream = await data_stream(peer)
        policy.denied = Denied()
        await asyncio.sleep(31)
        assert (await drained(stream))[1] == ResetCode.EXPIRED_AUTH_TOKEN
        assert await reply(talk) is None
        await talk.say(fin=True)
        await asyncio.sleep(1)
        assert set(tables_of(session).values()) == {0}


@pytest.mark.requirement("R10d")
async def test_an_announced_namespace_goes_with_its_right() -> None:
    policy, tracks = Script(Action.PUBLISH_NAMESPACE), Watched()
    async with hostile(tracks=tracks, policy=policy) as (session, peer):
        talk = await peer.ask(PublishNamespace(peer.id(), NAMESPACE))
        assert isinstance(await reply(talk), RequestOk)
        assert session.peer_namespaces == {NAMESPACE: 1}
        policy.denied = EXPIRED
        await asyncio.sleep(31)
        assert session.peer_namespaces == {}
        assert tracks.touched == ["offered", "offered"]
        assert await drained(talk.stream) == (0, ResetCode.EXPIRED_AUTH_TOKEN)
        assert talk.stream.stopped == ResetCode.EXPIRED_AUTH_TOKEN
        await peer_may_ask_again(peer, policy, PublishNamespace(peer.id(), NAMESPACE))


@pytest.mark.requirement("R10d")
async def test_a_watch_of_namespaces_goes_with_its_right() -> None:
    policy, tracks = Script(Action.SUBSCRIBE_NAMESPACE), Tracks()
    async with hostile(tracks=tracks, policy=policy) as (_, peer):
        talk = await peer.ask(SubscribeNamespace(peer.id(), NAMESPACE))
        assert isinstance(await reply(talk), RequestOk)
        policy.denied = EXPIRED
        await asyncio.sleep(31)
        tracks.announce((*NAMESPACE, b"x"))
        assert await drained(talk.stream) == (0, ResetCode.EXPIRED_AUTH_TOKEN)
        # The prefix is free again.
        await peer_may_ask_again(peer, policy, SubscribeNamespace(peer.id(), NAMESPACE))


async def peer_may_ask_again(peer: Peer, policy: Script, request: Request) -> None:
    policy.denied = None
    assert isinstance(await reply(await peer.ask(request)), RequestOk)


async def test_a_watch_that_nobody_reads_goes_with_its_right() -> None:
    """Even in the middle of a message, which the peer gives no credit for."""
    policy, tracks = Script(Action.SUBSCRIBE_NAMESPACE), Tracks()
    async with hostile(tracks=tracks, policy=policy, client=NARROW) as (session, peer):
        for number in range(200):
            tracks.announce((*NAMESPACE, b"%d" % number * 300))
        await peer.ask(SubscribeNamespace(peer.id(), NAMESPACE))
        await asyncio.sleep(1)
        assert session.publishing.prefixes
        policy.denied = EXPIRED
        await asyncio.sleep(31)
        assert not session.publishing.prefixes
        assert not session.closed


async def test_a_right_that_is_renewed_in_time_stays() -> None:
    """By a REQUEST_UPDATE with a new token; what is checked from then on is that token."""

    class ByToken(Script):
        async def decide(self, request: AccessRequest) -> Decision:
            decision = await super().decide(request)
            good = {(1, b"new"), (1, b"old")} if now() < 40 else {(1, b"new")}
            return decision if good.intersection(request.tokens + request.held_tokens) else EXPIRED

    policy = ByToken(Action.SUBSCRIBE, Action.REQUEST_UPDATE)
    async with hostile(policy=policy, setup=SetupOptions(tokens=(value(b"old"),))) as (session, peer):
        renewed = await peer.ask(Subscribe(peer.id(), NAME, with_token(b"old")))
        left = await peer.ask(Subscribe(peer.id(), NAME, with_token(b"old")))
        assert isinstance(await reply(renewed), SubscribeOk)
        assert isinstance(await reply(left), SubscribeOk)
        await asyncio.sleep(25)
        await renewed.say(RequestUpdate(peer.id(), with_token(b"new")))
        assert isinstance(await reply(renewed), RequestOk)
        await asyncio.sleep(1000)
        done = await reply(left)
        assert isinstance(done, PublishDone)
        assert done.status == DoneCode.EXPIRED
        assert len(session.publishing._subscriptions) == 1
        assert policy.asked[-1].held_tokens == ((1, b"new"), (1, b"old"))


async def test_a_right_that_is_lost_before_the_reply() -> None:
    """While the Track is looked for, which may take long: then it is refused."""
    policy = Script(*Action)
    async with hostile(track=long_track(), tracks=Slow(40), policy=policy) as (session, peer):
        some = Parameters(location_filter=LocationFilter.absolute_range(Location(0, 0), Location(1, 1)))
        asked = [
            await peer.ask(Subscribe(peer.id(), NAME)),
            await peer.ask(Fetch(peer.id(), NAME, some)),
            await peer.ask(TrackStatus(peer.id(), NAME)),
        ]
        await asyncio.sleep(1)
        assert len(policy.asked) == 4
        policy.denied = EXPIRED
        await asyncio.sleep(40)
        for talk in asked:
            await check_refused(talk, RequestCode.EXPIRED_AUTH_TOKEN)
        await asyncio.sleep(10)
        assert set(tables_of(session).values()) == {0}


async def test_a_policy_that_asks_for_no_check_is_not_asked_again() -> None:
    policy = Script(Action.SUBSCRIBE, again=None)
    async with hostile(policy=policy) as (_, peer):
        assert isinstance(await reply(await peer.ask(Subscribe(peer.id(), NAME))), SubscribeOk)
        policy.denied = EXPIRED
        await asyncio.sleep(80_000)
        assert [asked.action for asked in policy.asked] == [Action.SETUP, Action.SUBSCRIBE]


@pytest.mark.parametrize("action", list(REPLIES))
async def test_nothing_is_asked_about_a_request_that_is_over(action: Action) -> None:
    policy = Script(*Action)
    async with hostile(track=long_track(), policy=policy, client=NARROW) as (_, peer):
        talk = await peer.ask(
            WANTED[action](
                peer.id(), NAME, Parameters(location_filter=WHOLE) if action is Action.FETCH else Parameters()
            )
        )
        assert isinstance(await reply(talk), REPLIES[action])
        await asyncio.sleep(31)
        asked = len(policy.asked)
        assert asked == (2 if action is Action.TRACK_STATUS else 3)
        talk.stream.stop(ResetCode.CANCELLED)
        talk.stream.reset(ResetCode.CANCELLED)
        await asyncio.sleep(100)
        assert len(policy.asked) == asked


# EXPIRES.


@pytest.mark.parametrize("action", [Action.SUBSCRIBE, Action.PUBLISH_NAMESPACE, Action.SUBSCRIBE_NAMESPACE])
async def test_the_peer_is_told_how_long_its_right_lasts(action: Action) -> None:
    """In milliseconds, counted from the reply; an update brings a new time (moqt 5.3)."""
    policy = Script(*Action, expires=300)
    async with hostile(policy=policy, latency=0.0) as (_, peer):
        talk = await peer.ask(WANTED[action](peer.id(), NAME, Parameters()))
        answer = await reply(talk)
        assert isinstance(answer, SubscribeOk | RequestOk)
        assert answer.parameters.expires == 300_000
        await asyncio.sleep(20)
        await talk.say(RequestUpdate(peer.id()))
        answer = await reply(talk)
        assert isinstance(answer, RequestOk)
        assert answer.parameters.expires == 300_000


@pytest.mark.parametrize(("lasts", "left"), [(300.0, 280_000), (10.0, 1), (None, None)])
async def test_expires_counts_from_the_decision(lasts: float | None, left: int | None) -> None:
    """Though the Track is found only 20 s later. 0 would mean that it lasts for ever."""
    policy = Script(*Action, expires=lasts, again=None)
    async with hostile(tracks=Slow(20), policy=policy, latency=0.0) as (_, peer):
        talk = await peer.ask(Subscribe(peer.id(), NAME))
        await asyncio.sleep(20)
        answer = await reply(talk)
        assert isinstance(answer, SubscribeOk)
        assert answer.parameters.expires == left


async def test_a_fetch_has_no_expires() -> None:
    """FETCH_OK has no such parameter (moqt 5.2)."""
    track = Track(NAME, one_subgroup=True)
    publish(track, (0, 0))
    async with hostile(track=track, policy=Script(*Action, expires=300)) as (_, peer):
        answer = await reply(await peer.ask(Fetch(peer.id(), NAME, Parameters(location_filter=WHOLE))))
        assert isinstance(answer, FetchOk)
        assert answer.parameters == Parameters()
