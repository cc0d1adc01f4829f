"""A session asks its policy before it does what its peer wants, and as long as that goes on (moqt 2.7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from moqt.authorization import AccessRequest, Action, Allowed, Decision, Denied
from moqt.errors import (
    DoneCode,
    RequestCode,
    ResetCode,
    SessionClosed,
    SessionCode,
    StreamReset,
)
from moqt.filters import Location, LocationFilter
from moqt.limits import Limits
from moqt.names import FullTrackName, TrackNamespace
from moqt.quic.api import QuicOptions, Stream
from moqt.track import Track, Tracks, Wanted
from moqt.wire import (
    AliasType,
    Fetch,
    FetchOk,
    Message,
    Namespace,
    Parameters,
    Publish,
    PublishDone,
    PublishNamespace,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    SetupOptions,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    Token,
    TrackStatus,
    encode,
)
from tests.moqt.ends import NAME, NAMESPACE, Peer, Talk, hostile, publish, publish_groups, tables_of
from tests.moqt.raw import check_closed, check_refused, unset

pytestmark = pytest.mark.virtual

NOWHERE = FullTrackName((b"nowhere", b"at all"), b"k0")
RESERVED = FullTrackName((b".session",), b"k0")
WHOLE = LocationFilter.absolute_start(0, 0)
EXPIRED = Denied(RequestCode.EXPIRED_AUTH_TOKEN, "the token has expired")

# What a peer may want of a Track, its namespace, or the prefix that is its namespace.
WANTED: dict[Action, Callable[[int, FullTrackName, Parameters], Request]] = {
    Action.SUBSCRIBE: lambda number, track, more: Subscribe(number, track, more),
    Action.FETCH: lambda number, track, more: Fetch(number, track, more),
    Action.TRACK_STATUS: lambda number, track, more: TrackStatus(number, track, more),
    Action.PUBLISH: lambda number, track, more: Publish(number, track, 1, more),
    Action.PUBLISH_NAMESPACE: lambda number, track, more: PublishNamespace(number, track.namespace, more),
    Action.SUBSCRIBE_NAMESPACE: lambda number, track, more: SubscribeNamespace(number, track.namespace, more),
    Action.SUBSCRIBE_TRACKS: lambda number, track, more: SubscribeTracks(number, track.namespace, more),
}
each_action = pytest.mark.parametrize("action", list(WANTED))


class Script:
    """A policy that allows some actions, and is asked again every 30 s while something goes on.

    `takes` is how long it thinks; with `denied` it allows nothing any more.
    """

    def __init__(
        self, *actions: Action, takes: float = 0.0, expires: float | None = None, again: float | None = 30.0
    ) -> None:
        self.actions = {Action.SETUP, *actions}
        self.takes = takes
        self.denied: Denied | None = None
        self.asked: list[AccessRequest] = []
        self.pending = 0
        self._allowed = Allowed(revalidate_after=again, expires_after=expires)

    async def decide(self, request: AccessRequest) -> Decision:
        self.asked.append(request)
        if self.takes:
            self.pending += 1
            try:
                await asyncio.sleep(self.takes)
            finally:
                self.pending -= 1
        if self.denied is not None:
            return self.denied
        return self._allowed if self.actions.issuperset(request.needs) else Denied()


class Watched(Tracks):
    """Tracks that tell whether anybody has looked."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[str] = []

    def get(self, name: FullTrackName) -> Track | None:
        self.touched.append("get")
        return super().get(name)

    async def find(
        self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0, wanted: Wanted | None = None
    ) -> Track:
        self.touched.append("find")
        return await super().find(name, asker, rendezvous=rendezvous)

    def offered(self, peer: object, namespace: TrackNamespace, present: bool) -> None:
        self.touched.append("offered")

    def wanted(self, asker: object, prefix: TrackNamespace, present: bool) -> None:
        self.touched.append("wanted")

    @property
    def namespaces(self) -> tuple[TrackNamespace, ...]:
        self.touched.append("namespaces")
        return super().namespaces


class Slow(Tracks):
    """Tracks that take so many seconds to be found, as those of a relay may."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def get(self, name: FullTrackName) -> Track | None:
        return None

    async def find(
        self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0, wanted: Wanted | None = None
    ) -> Track:
        await asyncio.sleep(self._seconds)
        track = super().get(name)
        assert track is not None
        return track


def value(text: bytes) -> Token:
    return Token(AliasType.USE_VALUE, None, 1, text)


def with_token(*texts: bytes) -> Parameters:
    return Parameters(tokens=tuple(map(value, texts)))


async def everything(stream: Stream) -> bytes:
    """All bytes to FIN."""
    data = b""
    async with asyncio.timeout(30):
        while more := await stream.read():
            data += more
    return data


async def reply(talk: Talk) -> Message | None:
    async with asyncio.timeout(1):
        return await talk.next()


NARROW = QuicOptions(max_stream_data=4096, max_data=32768)
"""Of a peer that takes a few Objects of a stream, and no more until they are read."""


def long_track() -> Track:
    """A Track that does not fit into what a NARROW peer takes."""
    track = Track(NAME, one_subgroup=True)
    publish_groups(track, range(20), 50)
    return track


def now() -> float:
    return asyncio.get_running_loop().time()


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


REPLIES: dict[Action, type[Message]] = {
    Action.SUBSCRIBE: SubscribeOk,
    Action.FETCH: FetchOk,
    Action.TRACK_STATUS: RequestOk,
    Action.PUBLISH_NAMESPACE: RequestOk,
    Action.SUBSCRIBE_NAMESPACE: RequestOk,
}


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


# While it goes on.


async def data_stream(peer: Peer) -> Stream:
    """The next data stream, behind the control stream."""
    async with asyncio.timeout(1):
        while (stream := await peer.connection.accept()).bidirectional or stream.id in (2, 3):
            pass
    return stream


async def drained(stream: Stream) -> tuple[int, int | None]:
    """How many bytes come now, and the code of the reset, if there is one."""
    size = 0
    try:
        async with asyncio.timeout(0.5):
            while data := await stream.read():
                size += len(data)
        return size, None
    except StreamReset as reset:
        return size, reset.code
    except TimeoutError:
        return size, -1


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


# Aliases (moqt 2.7).


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
        assert session._serving <= 1


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
