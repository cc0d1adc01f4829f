"""A relay serves each of its clients what that client has the right to, as long as it has it (moqt 15 #16,
kvcs 8 and 10). Tokens are real; their clock is the virtual one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvcs.names import PublicationName
from kvcs.policy import KvcsPolicy
from kvcs.token import Role, claims_for, issue
from moqt import FullTrackName, Location, LocationFilter, Session, Track, Tracks
from moqt.authorization import AccessRequest, Action, AllowAll, Decision
from moqt.cat import CAT, Verifier
from moqt.cose import Algorithm, Key
from moqt.errors import DoneCode, RequestCode, RequestRejected, ResetCode, StreamReset
from moqt.names import TrackNamespace
from moqt.quic.link import Link, pair
from moqt.relay import Relay
from moqt.subscribing import Fill, StreamEnd
from moqt.wire import (
    AliasType,
    Fetch,
    Parameters,
    Publish,
    PublishNamespace,
    Request,
    RequestError,
    Subscribe,
    SubscribeNamespace,
    SubscribeTracks,
    Token,
    TrackStatus,
)
from tests.kvcs.stage import Wiretap
from tests.moqt.ends import Peer, Talk
from tests.moqt.scene import EVERYTHING, check_exactly_once, collect, filled, objects
from tests.relay.network import Network, join, network, until

pytestmark = pytest.mark.virtual

NOW = 1_700_000_000
KEY, OTHER_KEY = Key.generate(Algorithm.EDDSA), Key.generate(Algorithm.EDDSA)
ISSUER, RELAY = "https://auth.example", "relay-1"
OURS, THEIRS = b"\x01" * 16, b"\x02" * 16


def now() -> float:
    return asyncio.get_running_loop().time()


def namespace(scope_id: bytes = OURS, publication: bytes = b"\x05" * 16) -> TrackNamespace:
    return PublicationName(scope_id, b"\x03" * 32, b"\x04" * 32, publication).namespace


K = FullTrackName(namespace(), b"k.raw.s0")
ABSENT = FullTrackName(namespace(publication=b"\x09" * 16), b"k.raw.s0")
FOREIGN = FullTrackName(namespace(THEIRS), b"k.raw.s0")


def token(
    *roles: Role, scope: bytes = OURS, ttl: float = 3600, key: Key = KEY, **changes: Any
) -> tuple[Token, ...]:
    """What a client shows, issued now."""
    details: dict[str, Any] = {"issuer": ISSUER, "audience": RELAY, "revalidate": 5, "now": NOW + now()}
    value = issue(claims_for([scope], roles, ttl=ttl, **details | changes), key)
    return (Token(AliasType.USE_VALUE, type=CAT, value=value),)


class Policy(KvcsPolicy):
    """That of the relays. It notes what it is asked."""

    def __init__(self) -> None:
        verifier = Verifier({ISSUER: [KEY.public()]}, audience=RELAY)
        super().__init__(verifier, elsewhere=AllowAll(), clock=lambda: NOW + now())
        self.asked: list[AccessRequest] = []

    async def decide(self, request: AccessRequest) -> Decision:
        self.asked.append(request)
        return await super().decide(request)


@dataclass(slots=True)
class Scene:
    """Relays with the policy, and at the first one a publisher that has the right to. `taps` are on all
    links, `upstream` is the publisher's.
    """

    net: Network
    policy: Policy
    track: Track
    foreign: Track
    tracks: Tracks
    taps: dict[Link, Wiretap]
    upstream: Link

    @property
    def upstream_requests(self) -> list[Request]:
        """What the publisher was asked."""
        return self.taps[self.upstream].requests(from_client=False)


@asynccontextmanager
async def scene(relays: int = 1) -> AsyncIterator[Scene]:
    taps: dict[Link, Wiretap] = {}
    policy, tracks = Policy(), Tracks()

    def tap(link: Link) -> None:
        taps[link] = Wiretap(link)

    async with network(subscribers=0, relays=0, policy=policy, tap=tap) as net:
        await add_relays(net, relays)
        track, foreign = Track(K, one_subgroup=True), Track(FOREIGN, one_subgroup=True)
        for one in (track, foreign):
            filled(one, range(3), 3, 1000)
            tracks.add(one)
            tracks.announce(one.name.namespace)
        both = token(Role.PRODUCER) + token(Role.PRODUCER, scope=THEIRS)
        upstream, _ = await net.publish(tracks, tokens=both)
        await asyncio.sleep(1)
        yield Scene(net, policy, track, foreign, tracks, taps, upstream)


async def add_relays(net: Network, relays: int) -> None:
    for number in range(relays):
        relay = Relay()
        net.stack.push_async_callback(relay.close)
        net.relays.append(relay)
        if number:
            await net.chain(number, number - 1, tokens=token(Role.RELAY) + token(Role.RELAY, scope=THEIRS))


async def subscriber(scene: Scene, tokens: tuple[Token, ...]) -> Session:
    return (await scene.net.subscriber(tokens=tokens))[1]


# Who may ask for what.


@asynccontextmanager
async def raw_client(scene: Scene) -> AsyncIterator[Peer]:
    """Bytes in and out of the first relay."""
    link = pair()
    server = Session(link.server, tracks=scene.net.relays[0].tracks, announce=False, policy=scene.policy)
    peer = Peer(link.client)
    await asyncio.gather(server.start(), peer.set_up())
    try:
        yield peer
    finally:
        await server.close()
        peer.connection.close()
        await peer.connection.wait_closed()


def requests(track: FullTrackName, fields: int = 5) -> dict[Action, Any]:
    """Each action on a Track, or on the first `fields` of its namespace."""
    prefix = track.namespace[:fields]
    return {
        Action.SUBSCRIBE: lambda number, more: Subscribe(number, track, more),
        Action.FETCH: lambda number, more: Fetch(number, track, more),
        Action.TRACK_STATUS: lambda number, more: TrackStatus(number, track, more),
        Action.PUBLISH: lambda number, more: Publish(number, track, 1, more),
        Action.PUBLISH_NAMESPACE: lambda number, more: PublishNamespace(number, prefix, more),
        Action.SUBSCRIBE_NAMESPACE: lambda number, more: SubscribeNamespace(number, prefix, more),
        Action.SUBSCRIBE_TRACKS: lambda number, more: SubscribeTracks(number, prefix, more),
    }


async def everything(talk: Talk) -> bytes:
    data = b""
    async with asyncio.timeout(60):
        while more := await talk.stream.read():
            data += more
    return data


@pytest.mark.requirement("R10d")
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("action", list(requests(K)))
async def test_without_the_right_neither_cache_nor_upstream_is_looked_at(action: Action, warm: bool) -> None:
    """The answers about what is in the cache, what is upstream and what is nowhere are the same bytes after
    the same time, and nothing is asked upstream.
    """
    async with scene() as here, raw_client(here) as peer:
        if warm:
            session = await subscriber(here, token(Role.CONSUMER))
            async with await session.fetch(K, filter=EVERYTHING) as fetch:
                await collect(fetch)
        before = len(here.upstream_requests)
        for tokens in (
            (),
            token(Role.CONSUMER, scope=b"\x07" * 16) + token(Role.PRODUCER, scope=b"\x07" * 16),
            token(Role.CONSUMER, audience="relay-2"),
            token(Role.CONSUMER, ttl=0.5, now=NOW - 100),
            token(Role.CONSUMER, key=OTHER_KEY),
        ):
            answers, times = set(), []
            for track in (K, ABSENT, FOREIGN):
                start = now()
                build = requests(track)[action]
                talk = await peer.ask(build(peer.id(), Parameters(tokens=tokens)), fin=True)
                answers.add(await everything(talk))
                times.append(now() - start)
            assert len(answers) == 1
            assert times == pytest.approx([times[0]] * 3)
        await asyncio.sleep(20)
        assert len(here.upstream_requests) == before
        assert list(here.net.relays[0].feeds) == ([K] if warm else [])


@pytest.mark.requirement("R8b", "R10d")
@pytest.mark.parametrize(
    "action", [Action.SUBSCRIBE_NAMESPACE, Action.SUBSCRIBE_TRACKS, Action.PUBLISH_NAMESPACE]
)
@pytest.mark.parametrize("fields", [0, 1])
async def test_what_is_shorter_than_a_scope_is_denied(action: Action, fields: int) -> None:
    """Whatever the tokens are, and where other namespaces are open to all."""
    async with scene() as here, raw_client(here) as peer:
        tokens = token(Role.CONSUMER, Role.PRODUCER) + token(Role.CONSUMER, Role.PRODUCER, scope=THEIRS)
        build = requests(K, fields)[action]
        talk = await peer.ask(build(peer.id(), Parameters(tokens=tokens)), fin=True)
        answer = await talk.next()
        assert getattr(answer, "code", None) == RequestCode.UNAUTHORIZED


@pytest.mark.requirement("R8b", "R10d")
@pytest.mark.parametrize("relays", [1, 2])
async def test_a_scope_is_exactly_what_its_members_reach(relays: int) -> None:
    """Discovery, subscription, fetch and status of ("kvcs-1", Scope ID) with the token of that scope; of
    another one not, though it is in the cache.
    """
    async with scene(relays) as here:
        ours = await subscriber(here, token(Role.CONSUMER))
        theirs = await subscriber(here, token(Role.CONSUMER, scope=THEIRS))
        for session, track, other in ((ours, here.track, here.foreign), (theirs, here.foreign, here.track)):
            async with await session.subscribe_namespace(track.name.namespace[:2]) as watch:
                assert (await anext(watch)).namespace == track.name.namespace
                await asyncio.sleep(1)
                assert list(watch.namespaces) == [track.name.namespace]
            async with await session.fetch(track.name, filter=EVERYTHING) as fetch:
                check_exactly_once(track, objects(await collect(fetch)))
            assert (await session.track_status(track.name)).largest == track.largest
            async with await join(session, track.name) as subscription:
                assert subscription.largest == track.largest
            for asking in (
                session.subscribe(other.name),
                session.fetch(other.name, filter=EVERYTHING),
                session.track_status(other.name),
                session.subscribe_namespace(other.name.namespace[:2]),
                session.publish_namespace(track.name.namespace),
            ):
                with pytest.raises(RequestRejected) as caught:
                    await asking
                assert caught.value.code == RequestCode.UNAUTHORIZED


@pytest.mark.requirement("R10d")
async def test_a_namespace_announced_without_the_right_is_not_told_to_anybody() -> None:
    async with scene() as here:
        watcher = await subscriber(here, token(Role.CONSUMER))
        async with await watcher.subscribe_namespace(K.namespace[:2]) as watch:
            assert (await anext(watch)).namespace == K.namespace
            for tokens in ((), token(Role.CONSUMER), token(Role.PRODUCER, scope=THEIRS)):
                tracks = Tracks()
                tracks.announce(ABSENT.namespace)
                await here.net.publish(tracks, tokens=tokens)
                await asyncio.sleep(1)
            assert list(watch.namespaces) == [K.namespace]
            # Nor is anything asked of them.
            with pytest.raises(RequestRejected, match="DOES_NOT_EXIST"):
                await watcher.subscribe(ABSENT)
            await here.net.publish(tracks, tokens=token(Role.PRODUCER))
            assert (await anext(watch)).namespace == ABSENT.namespace


# As long as the right lasts.


@pytest.mark.requirement("R10d")
@pytest.mark.parametrize("relays", [1, 2])
async def test_a_token_that_expires_in_the_middle_of_a_subscription(relays: int) -> None:
    """Its subscriber is told so soon after, and gets nothing more, not even what is in the cache; the other
    one gets everything exactly once, over one upstream subscription.
    """
    async with scene(relays) as here:
        short = await subscriber(here, token(Role.CONSUMER, ttl=60))
        long = await subscriber(here, token(Role.CONSUMER))
        ends, stays = await join(short, K), await join(long, K)
        for group in range(3, 103):
            filled(here.track, [group], 3, 1000)
            await asyncio.sleep(1)
        got = objects(await collect(ends))
        assert ends.done is not None
        assert ends.done.status == DoneCode.EXPIRED
        last = max(item.location.group for item in got)
        assert 60 <= last <= 70  # C4M: skew 5 s, checked every 5 s.
        for asking in (short.subscribe(K), short.fetch(K, filter=EVERYTHING), short.track_status(K)):
            with pytest.raises(RequestRejected) as caught:
                await asking
            assert caught.value.code == RequestCode.EXPIRED_AUTH_TOKEN
        here.tracks.remove(K, DoneCode.TRACK_ENDED)
        check_exactly_once(here.track, objects(await collect(stays)))
        asked = [one for one in here.upstream_requests if isinstance(one, Subscribe)]
        assert len(asked) == 1


async def test_a_token_that_is_renewed_in_the_middle_of_a_subscription() -> None:
    async with scene() as here:
        session = await subscriber(here, token(Role.CONSUMER, ttl=60))
        subscription = await join(session, K)
        for group in range(3, 203):
            if group % 50 == 0:
                await session.renew(token(Role.CONSUMER, ttl=60))
            filled(here.track, [group], 3, 1000)
            await asyncio.sleep(1)
        here.tracks.remove(K, DoneCode.TRACK_ENDED)
        check_exactly_once(here.track, objects(await collect(subscription)))


async def test_what_waits_for_the_upstream_ends_with_the_token() -> None:
    """Fetches and a fill of what the relay does not have, from a publisher that is silent until the token
    has expired: reset where they had begun, refused where not.
    """
    async with scene() as here:
        here.net.relays[0].stall = here.net.relays[0].answer = 30.0
        session = await subscriber(here, token(Role.CONSUMER, ttl=4))
        async with (
            raw_client(here) as peer,
            await session.subscribe(K),
        ):  # So the relay knows the Largest Object, and no other.
            here.upstream.stall()
            asyncio.get_running_loop().call_later(20, here.upstream.resume)
            some = LocationFilter.absolute_range(Location(0, 0), Location(1, 1))
            begun = await session.fetch(K, filter=some)
            filling = await session.subscribe(K, fill=Fill(filter=some))
            more = Parameters(tokens=session.tokens, location_filter=LocationFilter.groups(0, 1))
            refused = await peer.ask(Fetch(peer.id(), K, more))
            for ending in (
                session.fetch(K, filter=LocationFilter.groups(0, 1), deadline=60),
                collect(begun),
            ):
                with pytest.raises(StreamReset) as caught:
                    await ending
                assert caught.value.code == ResetCode.EXPIRED_AUTH_TOKEN
            (end,) = await collect(filling)
            assert isinstance(end, StreamEnd)
            assert (end.fill, end.code) == (True, ResetCode.EXPIRED_AUTH_TOKEN)
            assert filling.done is not None
            assert filling.done.status == DoneCode.EXPIRED
            assert 5 < now() < 20
            answer = await refused.next()  # When the publisher has said where the last Object is.
            assert now() > 20
            assert isinstance(answer, RequestError)
            assert answer.code == RequestCode.EXPIRED_AUTH_TOKEN


# A relay's own rights.


async def test_a_relay_shows_its_own_token_upstream_and_never_its_clients() -> None:
    async with scene(2) as here:
        session = await subscriber(here, token(Role.CONSUMER, subject="client"))
        here.policy.asked.clear()
        async with await session.subscribe_namespace(K.namespace[:2]) as watch:
            await anext(watch)
        async with await join(session, K) as subscription:
            await anext(subscription)
        async with await session.fetch(K, filter=EVERYTHING) as fetch:
            await collect(fetch)
        await session.track_status(K)
        clients = session.tokens[0].value
        shown = [{value for _, value in asked.tokens + asked.held_tokens} for asked in here.policy.asked]
        assert {clients} in shown
        relays = [one for one in shown if clients not in one]
        assert {Action.SUBSCRIBE, Action.SUBSCRIBE_NAMESPACE} <= {
            asked.action for asked, one in zip(here.policy.asked, shown, strict=True) if one in relays
        }
        assert all(one == {clients} or one == relays[0] for one in shown)
        # Nothing of the client's token went over the wire between the relays.
        for link, tap in here.taps.items():
            sent = b"".join(piece.data for piece in tap.pieces)
            assert (clients in sent) == (link.client is session.connection)


async def test_what_the_upstream_says_of_the_relays_right_is_not_told_to_its_clients() -> None:
    """Their token is good: for them it is an internal error. With the next token of the relay they are
    served, and find what is there.
    """
    async with scene() as here:
        await add_relays(here.net, 1)
        lower = here.net.relays[1]
        link = await here.net.chain(1, 0, tokens=token(Role.RELAY, ttl=60))
        (upstream,) = lower._upstreams
        assert upstream.connection is link.client
        session = await subscriber(here, token(Role.CONSUMER))
        running = await join(session, K)
        watch = await session.subscribe_namespace(K.namespace[:2])
        assert (await anext(watch)).present
        await asyncio.sleep(75)
        assert not (await anext(watch)).present
        items = objects(await collect(running))
        check_exactly_once(here.track, items)
        assert running.done is not None
        assert running.done.status == DoneCode.INTERNAL_ERROR
        fresh = FullTrackName(K.namespace, b"v.raw.s0")
        other = Track(fresh, one_subgroup=True)
        filled(other, range(3), 3, 100)
        here.tracks.add(other)
        with pytest.raises(RequestRejected) as caught:
            await session.subscribe(fresh)
        assert (caught.value.code, caught.value.reason) == (
            RequestCode.INTERNAL_ERROR,
            "the publisher refused what we asked",
        )
        await upstream.renew(token(Role.RELAY))
        assert (await anext(watch)).present
        async with await session.subscribe(fresh, fill=Fill(filter=EVERYTHING)) as again:
            here.tracks.remove(fresh, DoneCode.TRACK_ENDED)
            check_exactly_once(other, objects(await collect(again)))


async def test_a_relay_that_its_upstream_denies_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its clients only see that nothing is found. It says so once for each kind of request."""
    async with scene() as here:
        await add_relays(here.net, 1)
        await here.net.chain(1, 0)
        session = await subscriber(here, token(Role.CONSUMER) + token(Role.CONSUMER, scope=THEIRS))
        for name in (K, FOREIGN):
            await session.subscribe_namespace(name.namespace)
            with pytest.raises(RequestRejected):
                await session.subscribe(name)
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert {record.name for record in warnings} == {"moqt.relay.relay"}
        texts = sorted(record.getMessage() for record in warnings)
        assert len(texts) == 2
        for what, text in zip(("SUBSCRIBE ", "SUBSCRIBE_NAMESPACE "), texts, strict=True):
            assert f"rejected {what}with UNAUTHORIZED" in text
            assert "--token" in text


async def test_a_relay_that_renews_its_token_loses_nothing() -> None:
    async with scene() as here:
        await add_relays(here.net, 1)
        lower = here.net.relays[1]
        await here.net.chain(1, 0, tokens=token(Role.RELAY, ttl=60))
        (upstream,) = lower._upstreams
        session = await subscriber(here, token(Role.CONSUMER))
        subscription = await join(session, K)
        for group in range(3, 203):
            if group % 50 == 0:
                await upstream.renew(token(Role.RELAY, ttl=60))
            filled(here.track, [group], 3, 1000)
            await asyncio.sleep(1)
        here.tracks.remove(K, DoneCode.TRACK_ENDED)
        check_exactly_once(here.track, objects(await collect(subscription)))
        await until(lambda: not upstream.closed)
