"""Namespaces, TRACK_STATUS, and the requests that are answered without being served (moqt 4.1, 11)."""

from __future__ import annotations

import asyncio

import pytest

from moqt.errors import RequestCode, RequestRejected, ResetCode, SessionClosed, SessionCode, StreamReset
from moqt.filters import Location
from moqt.limits import Limits
from moqt.names import FullTrackName, TrackNamespace
from moqt.namespaces import NamespaceEvent, NamespaceWatch, announce
from moqt.quic.api import QuicOptions
from moqt.tracks import Tracks
from moqt.wire import (
    Message,
    MessageDecoder,
    Namespace,
    NamespaceDone,
    Parameters,
    PropertyType,
    Publish,
    PublishNamespace,
    RequestError,
    RequestOk,
    RequestUpdate,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
    encode,
)
from tests.counted import CountedField
from tests.moqt.ends import (
    NAME,
    NAMESPACE,
    Peer,
    Talk,
    hostile,
    old_track,
    publish,
    sessions,
    tables_of,
)
from tests.moqt.raw import check_closed, check_refused

pytestmark = pytest.mark.virtual

A, AB, ABC, AC, X = (b"a",), (b"a", b"b"), (b"a", b"b", b"c"), (b"a", b"c"), (b"x",)


async def events(watch: NamespaceWatch, count: int) -> list[tuple[TrackNamespace, bool]]:
    async with asyncio.timeout(1):
        found = [await anext(watch) for _ in range(count)]
    assert all(isinstance(event, NamespaceEvent) for event in found)
    return [(event.namespace, event.present) for event in found]


# SUBSCRIBE_NAMESPACE.


@pytest.mark.parametrize("publisher_dials", [True, False])
async def test_namespaces_that_are_there_and_that_come_and_go(publisher_dials: bool) -> None:
    async with sessions(publisher_dials=publisher_dials) as ends:
        for namespace in (AB, X, A, ABC):
            ends.tracks.announce(namespace)
        async with await ends.subscriber.subscribe_namespace(A) as watch:
            assert await events(watch, 3) == [(AB, True), (A, True), (ABC, True)]
            ends.tracks.announce(AC)
            ends.tracks.announce(AC)
            ends.tracks.announce((b"ab",))
            assert await events(watch, 1) == [(AC, True)]
            ends.tracks.withdraw(AB)
            ends.tracks.withdraw((b"never",))
            assert await events(watch, 1) == [(AB, False)]
            assert list(watch.namespaces) == [A, ABC, AC]
            with pytest.raises(TimeoutError):
                await events(watch, 1)
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
        await asyncio.sleep(0.1)
        assert set(tables_of(ends.subscriber).values()) == {0}
        assert set(tables_of(ends.publisher).values()) == {0}
        assert not ends.tracks._watchers


async def test_the_empty_prefix_is_everything() -> None:
    async with sessions() as ends, await ends.subscriber.subscribe_namespace(()) as watch:
        for namespace in (A, X):
            ends.tracks.announce(namespace)
        assert await events(watch, 2) == [(A, True), (X, True)]


async def test_what_came_and_went_before_anybody_looked() -> None:
    async with sessions() as ends, await ends.subscriber.subscribe_namespace(A) as watch:
        for namespace in (AB, AC):
            ends.tracks.announce(namespace)
        await asyncio.sleep(0.1)
        ends.tracks.withdraw(AB)
        await asyncio.sleep(0.1)
        assert list(watch.namespaces) == [AC]
        assert await events(watch, 1) == [(AC, True)]
        ends.tracks.withdraw(AC)
        await asyncio.sleep(0.1)
        ends.tracks.announce(AC)
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await events(watch, 1)


async def test_many_changes_on_a_narrow_stream() -> None:
    """Messages are not torn, whatever the credit."""
    options = QuicOptions(max_stream_data=4096, max_data=8192)
    async with sessions(client=options, server=options, chunk=11, seed=3, jitter=0.01) as ends:
        expected = {(*A, b"%0100d" % number) for number in range(300)}
        async with await ends.subscriber.subscribe_namespace(A) as watch:
            for number, namespace in enumerate(sorted(expected)):
                ends.tracks.announce(namespace)
                if number % 50 == 0:
                    await asyncio.sleep(0.01)
            while set(watch.namespaces) != expected:
                await anext(watch)
            for namespace in expected:
                ends.tracks.withdraw(namespace)
            while watch.namespaces:
                await anext(watch)


async def test_overlapping_prefixes() -> None:
    """S18. Each way, and equal ones; the place is free when a watch has ended."""
    async with sessions() as ends:
        watch = await ends.subscriber.subscribe_namespace(AB)
        for prefix in (A, AB, ABC, ()):
            with pytest.raises(RequestRejected) as caught:
                await ends.subscriber.subscribe_namespace(prefix)
            assert caught.value.code == RequestCode.PREFIX_OVERLAP
        other = await ends.subscriber.subscribe_namespace(AC)
        await watch.close()
        await asyncio.sleep(0.1)
        again = await ends.subscriber.subscribe_namespace(ABC)
        for one in (other, again):
            await one.close()
            await one.close()


async def test_another_session_may_watch_the_same() -> None:
    async with sessions() as one, sessions() as other:
        one.publisher.tracks.announce(A)
        for ends in (one, other):
            await ends.subscriber.subscribe_namespace(A)


async def watching(peer: Peer, prefix: TrackNamespace) -> Talk:
    talk = await peer.ask(SubscribeNamespace(peer.id(), prefix))
    assert await talk.next() == RequestOk()
    return talk


async def test_the_prefix_is_updated() -> None:
    """What follows has suffixes of the new prefix, and begins anew (moqt 5.2)."""
    async with hostile() as (session, peer):
        for namespace in (AB, AC, ABC, X):
            session.tracks.announce(namespace)
        talk = await watching(peer, AB)
        assert [await talk.next() for _ in range(2)] == [Namespace(()), Namespace((b"c",))]
        await talk.say(RequestUpdate(peer.id(), Parameters(prefix=A)))
        answers: list[Message | None] = [await talk.next() for _ in range(4)]
        assert answers == [RequestOk(), Namespace((b"b",)), Namespace((b"c",)), Namespace((b"b", b"c"))]
        session.tracks.withdraw(AC)
        assert await talk.next() == NamespaceDone((b"c",))
        await talk.say(RequestUpdate(peer.id(), Parameters(prefix=A)))
        await talk.say(RequestUpdate(peer.id(), Parameters()))
        assert [await talk.next() for _ in range(2)] == [RequestOk(), RequestOk()]
        assert session.publishing.prefixes == [A]


async def test_the_prefix_is_updated_while_names_are_told() -> None:
    """A suffix never belongs to another prefix than the one that the reply before it made valid."""
    options = QuicOptions(max_stream_data=4096)
    async with hostile(client=options, chunk=100) as (session, peer):
        known = {(b"p", b"q", b"%0200d" % number) for number in range(100)}
        for namespace in sorted(known):
            session.tracks.announce(namespace)
        talk = await watching(peer, (b"p",))
        prefix: TrackNamespace = (b"p",)
        for wanted in ((b"p", b"q"), (b"p",), (b"p", b"q")):
            await talk.next()
            await talk.say(RequestUpdate(peer.id(), Parameters(prefix=wanted)))
            while isinstance(message := await talk.next(), Namespace):
                assert (*prefix, *message.suffix) in known
            assert message == RequestOk()
            prefix = wanted
        told: set[TrackNamespace] = set()
        while len(told) < 100:
            message = await talk.next()
            assert isinstance(message, Namespace)
            told.add((*prefix, *message.suffix))
        assert told == known


async def test_an_update_to_an_overlapping_prefix() -> None:
    """REQUEST_ERROR, and the stream is closed (moqt 4.2)."""
    async with hostile() as (session, peer):
        await watching(peer, AB)
        talk = await watching(peer, AC)
        await talk.say(RequestUpdate(peer.id(), Parameters(prefix=A)))
        answer = await talk.next()
        assert isinstance(answer, RequestError)
        assert answer.code == RequestCode.PREFIX_OVERLAP
        assert await talk.next() is None
        session.tracks.announce(AC)
        await talk.say(b"", fin=True)
        await asyncio.sleep(0.1)
        assert session.publishing.prefixes == [AB]
        await peer.alive()


@pytest.mark.parametrize("how", ["reset", "fin"])
async def test_broken_off_by_the_publisher(how: str) -> None:
    """Its namespaces are gone, and it was no end of ours: it raises (moqt 11)."""
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace(A))
        talk, _ = await peer.request()
        await talk.say(RequestOk(), Namespace((b"b",)))
        watch = await asking
        await asyncio.sleep(0.1)
        if how == "reset":
            talk.stream.reset(ResetCode.GOING_AWAY)
        else:
            await talk.say(b"", fin=True)
        await asyncio.sleep(0.1)
        assert await events(watch, 1) == [(AB, True)]
        with pytest.raises(StreamReset):
            await anext(watch)
        assert set(tables_of(session).values()) == {0}


async def test_a_peer_that_floods_us_with_namespaces() -> None:
    async with hostile(limits=Limits(max_namespaces=100)) as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace(A))
        talk, _ = await peer.request()
        await talk.say(RequestOk(), *(Namespace((b"%d" % number,)) for number in range(100)))
        watch = await asking
        assert len(await events(watch, 100)) == 100
        with pytest.raises(TimeoutError):  # As many as are allowed.
            await events(watch, 1)
        await talk.say(Namespace((b"100",)))
        assert len(await events(watch, 1)) == 1
        with pytest.raises(StreamReset) as caught:
            await anext(watch)
        assert caught.value.code == ResetCode.EXCESSIVE_LOAD
        await asyncio.sleep(0.1)
        assert talk.stream.stopped == ResetCode.EXCESSIVE_LOAD
        await peer.alive()


async def test_namespaces_that_come_and_go_do_not_add_up() -> None:
    async with hostile(limits=Limits(max_namespaces=100)) as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace(A))
        talk, _ = await peer.request()
        await talk.say(RequestOk())
        watch = await asking
        for number in range(1000):
            await talk.say(Namespace((b"%d" % number,)), NamespaceDone((b"%d" % number,)))
        await asyncio.sleep(0.1)
        assert not watch.namespaces
        assert not watch._events
        await peer.alive()


# PUBLISH_NAMESPACE.


@pytest.mark.parametrize("publisher_dials", [True, False])
async def test_announced_and_withdrawn_by_itself(publisher_dials: bool) -> None:
    async with sessions(publisher_dials=publisher_dials, announce=True) as ends:
        ends.tracks.announce(NAMESPACE)
        ends.tracks.announce(A)
        await asyncio.sleep(0.1)
        assert list(ends.subscriber.peer_namespaces) == [NAMESPACE, A]
        ends.tracks.withdraw(NAMESPACE)
        await asyncio.sleep(0.1)
        assert list(ends.subscriber.peer_namespaces) == [A]
        ends.tracks.announce(NAMESPACE)
        ends.tracks.withdraw(NAMESPACE)
        ends.tracks.announce(X)
        await asyncio.sleep(0.1)
        assert set(ends.subscriber.peer_namespaces) == {A, X}


async def test_by_hand_and_twice() -> None:
    async with sessions() as ends:
        first = await ends.publisher.publish_namespace(A)
        second = await ends.publisher.publish_namespace(A)
        assert ends.subscriber.peer_namespaces == {A: 2}
        await first.close()
        await first.close()
        await asyncio.sleep(0.1)
        assert ends.subscriber.peer_namespaces == {A: 1}
        await second.close()
        await asyncio.sleep(0.1)
        assert ends.subscriber.peer_namespaces == {}
        assert set(tables_of(ends.publisher).values()) == {0}


async def test_one_announcement_that_gets_no_answer_does_not_hold_up_the_others() -> None:
    """Nor one that is rejected."""
    async with hostile(limits=Limits(reply_deadline=5)) as (session, peer):
        session.spawn(announce(session), "announce")
        session.tracks.announce(A)
        silent, _ = await peer.request()
        session.tracks.announce(X)
        talk, message = await peer.request()
        assert message.namespace == X
        await talk.say(RequestError(RequestCode.UNAUTHORIZED), fin=True)
        session.tracks.announce(AC)
        talk, message = await peer.request()
        assert message.namespace == AC
        await talk.say(RequestOk())
        await asyncio.sleep(6)
        with pytest.raises(StreamReset):
            await silent.next()
        session.tracks.withdraw(AC)
        with pytest.raises(StreamReset):
            await talk.next()
        assert session._requests == set()


async def test_fin_withdraws_nothing() -> None:
    async with hostile() as (session, peer):
        talk = await peer.ask(PublishNamespace(peer.id(), A), fin=True)
        assert await talk.next() == RequestOk()
        await asyncio.sleep(10)
        assert A in session.peer_namespaces
        talk.stream.stop(ResetCode.CANCELLED)
        await asyncio.sleep(0.1)
        assert A not in session.peer_namespaces


async def test_an_update_of_an_announcement() -> None:
    async with hostile() as (_, peer):
        talk = await peer.ask(PublishNamespace(peer.id(), A), RequestUpdate(peer.id()))
        assert [await talk.next() for _ in range(2)] == [RequestOk(), RequestOk()]


async def test_cancelled_by_the_receiver() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.publish_namespace(A))
        talk, _ = await peer.request()
        await talk.say(RequestOk())
        announcement = await asking
        talk.stream.reset(ResetCode.CANCELLED)
        await asyncio.sleep(0.1)
        assert set(tables_of(session).values()) == {0}
        await announcement.close()


# TRACK_STATUS.


async def test_track_status() -> None:
    track = old_track()
    track.properties = ((PropertyType.MAX_CACHE_DURATION, 5),)
    async with sessions(track=track) as ends:
        status = await ends.subscriber.track_status(NAME)
        assert (status.largest, status.properties) == (Location(2, 1), track.properties)
        with pytest.raises(RequestRejected) as caught:
            await ends.subscriber.track_status(FullTrackName(A, b""))
        assert caught.value.code == RequestCode.DOES_NOT_EXIST
        await asyncio.sleep(0.1)
        assert set(tables_of(ends.subscriber).values()) == {0}
        assert set(tables_of(ends.publisher).values()) == {0}


async def test_track_status_of_a_track_without_objects() -> None:
    async with sessions() as ends:
        assert (await ends.subscriber.track_status(NAME)).largest is None


async def test_track_status_without_properties() -> None:
    """INCLUDE_PROPERTIES 0 (moqt 5.3)."""
    track = old_track()
    track.properties = ((PropertyType.MAX_CACHE_DURATION, 5),)
    async with hostile(track=track) as (_, peer):
        talk = await peer.ask(TrackStatus(peer.id(), NAME, Parameters(include_properties=False)), fin=True)
        assert await talk.next() == RequestOk(Parameters(largest=Location(2, 1)))
        assert await talk.next() is None


async def test_largest_moves() -> None:
    async with sessions() as ends:
        for at in ((0, 5), (0, 7), (3, 0), (1, 0)):
            publish(ends.track, at)
            status = await ends.subscriber.track_status(NAME)
            assert status.largest == max(Location(*at), Location(3, 0) if at == (1, 0) else Location(*at))


# What is answered, and not served.


async def test_publish_is_answered() -> None:
    async with hostile() as (session, peer):
        talk = await peer.ask(Publish(peer.id(), NAME, 1))
        await check_refused(talk, RequestCode.UNINTERESTED)
        await talk.say(b"", fin=True)
        await asyncio.sleep(0.1)
        assert session.serving == 0


async def test_subscribe_tracks_is_answered() -> None:
    """X34 is accepted as a message; prefixes may not overlap (moqt 11)."""
    async with hostile() as (_, peer):
        for prefix, parameters in ((A, Parameters()), (X, Parameters(subscriber_priority=1))):
            talk = await peer.ask(SubscribeTracks(peer.id(), prefix, parameters))
            assert await talk.next() == RequestOk()
        await check_refused(await peer.ask(SubscribeTracks(peer.id(), AB)), RequestCode.PREFIX_OVERLAP)


async def test_a_peer_that_goes_on_after_it_was_refused() -> None:
    """What had crossed the refusal is ignored; the stream's credit comes back; garbage still closes."""
    async with hostile(server=QuicOptions(max_bidi_streams=2)) as (session, peer):
        for _ in range(20):
            stream = await peer.connection.open_when_possible(bidirectional=True)
            await stream.write(encode(Publish(peer.id(), NAME, 1)) + encode(RequestUpdate(peer.id())))
            talk = Talk(stream, MessageDecoder(request=Publish))
            await check_refused(talk, RequestCode.UNINTERESTED)
            await talk.say(RequestUpdate(peer.id()), fin=True)
        talk = Talk(
            await peer.connection.open_when_possible(bidirectional=True), MessageDecoder(request=Publish)
        )
        await talk.say(Publish(peer.id(), NAME, 1))
        await check_refused(talk, RequestCode.UNINTERESTED)
        await talk.say(RequestOk())
        await check_closed(session, peer, SessionCode.PROTOCOL_VIOLATION)


async def test_a_peer_that_never_ends_its_side() -> None:
    """Its stream is stopped after a while, so that it does not stay for ever."""
    async with hostile(limits=Limits(linger=3.0)) as (session, peer):
        talk = await peer.ask(Publish(peer.id(), NAME, 1))
        await check_refused(talk, RequestCode.UNINTERESTED)
        await asyncio.sleep(2.9)
        assert talk.stream.stopped is None
        await asyncio.sleep(0.2)
        assert talk.stream.stopped is not None
        assert len(session._tasks) == 2


async def test_closed_by_the_peer_while_watching() -> None:
    async with hostile() as (session, peer):
        asking = asyncio.ensure_future(session.subscribe_namespace(A))
        talk, _ = await peer.request()
        await talk.say(RequestOk(), Namespace((b"b",)))
        watch = await asking
        await asyncio.sleep(0.1)
        peer.connection.close(7, "bye")
        await asyncio.sleep(0.1)
        assert await events(watch, 1) == [(AB, True)]
        with pytest.raises(SessionClosed) as caught:
            await anext(watch)
        assert (caught.value.code, caught.value.reason, caught.value.remote) == (7, "bye", True)


def counted(*fields: bytes) -> TrackNamespace:
    return tuple(map(CountedField, fields))


async def test_a_change_is_not_compared_with_all_there_is() -> None:
    """With so many namespaces, and so many who want to know of some, each change costs little (moqt 21)."""
    async with hostile() as (session, peer):
        for number in range(400):
            session.tracks.announce(counted(b"n%d" % number, b"x"))
        talks = [await peer.ask(SubscribeNamespace(peer.id(), (b"n%d" % number,))) for number in range(50)]
        for talk in talks:
            assert isinstance(await talk.next(), RequestOk)
            assert await talk.next() == Namespace((b"x",))
        CountedField.comparisons = 0
        session.tracks.announce(counted(b"n7", b"y"))
        session.tracks.withdraw(counted(b"n8", b"x"))
        assert await talks[7].next() == Namespace((b"y",))
        assert await talks[8].next() == NamespaceDone((b"x",))
        assert CountedField.comparisons < 500


async def test_announcements_are_not_compared_with_each_other() -> None:
    tracks = Tracks()
    for number in range(100):
        tracks.announce(counted(b"n%d" % number))
    async with hostile(tracks=tracks) as (session, peer):
        session.spawn(announce(session), "announce")
        for _ in range(100):
            talk, request = await peer.request()
            assert isinstance(request, PublishNamespace)
            await talk.say(RequestOk())
        CountedField.comparisons = 0
        tracks.announce(counted(b"more"))
        _, request = await peer.request()
        assert request.namespace == (b"more",)
        assert CountedField.comparisons < 500
