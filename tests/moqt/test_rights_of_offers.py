"""PUBLISH and SUBSCRIBE_TRACKS, as long as the right lasts (moqt 5.3, 11, security 3.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from moqt.authorization import AccessRequest, Action, Decision
from moqt.errors import DoneCode, MoqtError, RequestCode, RequestRejected
from moqt.names import FullTrackName
from moqt.offers import Offer, publish
from moqt.quic.link import pair
from moqt.session import Session
from moqt.subscribing import Item
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import (
    Parameters,
    Publish,
    PublishDone,
    RequestError,
    RequestOk,
    RequestUpdate,
    SetupOptions,
    SubscribeTracks,
)
from tests.moqt.ends import NAME, NAMESPACE, OTHER, hostile, objects_of, publish_groups, tables_of
from tests.moqt.rights import EXPIRED, Lasting, Script, reply, until, value, with_token

pytestmark = pytest.mark.virtual


class Taking(Tracks):
    """Takes what is published to it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[FullTrackName, Offer] = {}
        self.items: list[Item] = []

    async def published(self, peer: object, offer: Offer) -> None:
        await offer.accept()
        self.taken[offer.track] = offer
        try:
            async for item in offer:
                self.items.append(item)
        finally:
            del self.taken[offer.track]


@asynccontextmanager
async def ends(*tracks: Track) -> AsyncIterator[tuple[Session, Session, Taking, Lasting]]:
    """A client whose token lasts for a minute, and a server that takes what is published, publishes `tracks`,
    and has the policy. The Tracks of the client take what is published, too.
    """
    link = pair()
    taking, policy = Taking(), Lasting()
    for track in tracks:
        taking.add(track)
    server = Session(link.server, tracks=taking, announce=False, policy=policy)
    client = Session(link.client, tracks=Taking(), announce=False)
    try:
        await asyncio.gather(server.start(), client.start())
        await client.renew(until(60))
        yield client, server, taking, policy
    finally:
        await asyncio.gather(server.close(), client.close())


@pytest.mark.parametrize("renews", [True, False])
async def test_a_published_track(renews: bool) -> None:
    """It is taken as long as its publisher has the right to publish it, by tokens of its own."""
    track = Track(NAME, one_subgroup=True)
    async with ends() as (client, server, taking, policy):
        serving = asyncio.ensure_future(publish(client, track))
        await asyncio.sleep(1)
        for group in range(100):
            if renews and group % 40 == 0:
                await client.renew(until(group + 60))
            publish_groups(track, [group], 1)
            await asyncio.sleep(1)
        assert policy.asked[1].action is Action.PUBLISH
        assert policy.asked[1].tokens == ((1, b"60"),)
        groups = [item.location.group for item in objects_of(taking.items)]
        assert (len(groups) == 100) is renews
        assert (NAME in taking.taken) is renews
        assert serving.done() is not renews
        if not renews:
            assert 55 <= len(groups) <= 65  # Looked at every 5 s.
            with pytest.raises(RequestRejected, match="PUBLISH with EXPIRED_AUTH_TOKEN"):
                await publish(client, track)
        else:
            updates = [asked for asked in policy.asked if asked.action is Action.REQUEST_UPDATE]
            assert {asked.updates for asked in updates} == {Action.PUBLISH}
            track.close(DoneCode.TRACK_ENDED)
        with suppress(MoqtError):
            await serving
        await asyncio.sleep(10)
        assert not track._watchers
        assert set(tables_of(client).values()) == set(tables_of(server).values()) == {0}


@pytest.mark.parametrize("renews", [True, False])
@pytest.mark.parametrize("goes_on", [True, False], ids=["asking", "no longer asking"])
async def test_all_tracks(renews: bool, goes_on: bool) -> None:
    """What is published because of a SUBSCRIBE_TRACKS ends with the right to it, whether that request still
    goes on or not; the tokens of a PUBLISH are never those of the SUBSCRIBE_TRACKS.
    """
    track, later = Track(NAME, one_subgroup=True), Track(OTHER, one_subgroup=True)
    empty = Track(FullTrackName(NAMESPACE, b"empty"))
    async with ends(track, empty) as (client, server, taking, policy):
        watch = await client.subscribe_tracks(NAMESPACE)
        await asyncio.sleep(1)
        if not goes_on:
            await watch.close()
        theirs = client.tracks
        assert isinstance(theirs, Taking)
        for group in range(100):
            if renews and group % 40 == 0:
                await client.renew(until(group + 60))
            publish_groups(track, [group], 1)
            await asyncio.sleep(1)
        groups = [item.location.group for item in objects_of(theirs.items)]
        assert (len(groups) == 100) is renews
        assert sorted(theirs.taken, key=str) == (sorted([empty.name, NAME], key=str) if renews else [])
        if not renews:
            assert 55 <= len(groups) <= 65  # Looked at every 5 s.
        taking.add(later)
        await asyncio.sleep(1)
        assert (OTHER in theirs.taken) is (renews and goes_on)
        for one in (track, later, empty):
            one.close(DoneCode.TRACK_ENDED)
        await watch.close()
        await asyncio.sleep(10)
        asked = len(policy.asked)
        await asyncio.sleep(100)
        assert len(policy.asked) == asked
        assert not track._watchers
        assert set(tables_of(client).values()) == set(tables_of(server).values()) == {0}


async def test_a_subscriber_of_all_tracks_is_told() -> None:
    """PUBLISH_DONE says that the right has ended."""
    policy, track = Script(Action.SUBSCRIBE_TRACKS), Track(NAME, one_subgroup=True)
    setup = SetupOptions(tokens=(value(b"theirs"),))
    async with hostile(track=track, policy=policy, setup=setup) as (_, peer):
        await peer.ask(SubscribeTracks(peer.id(), NAMESPACE, with_token(b"theirs")))
        talk, message = await peer.request()
        assert isinstance(message, Publish)
        assert message.parameters.tokens == ()
        await talk.say(RequestOk())
        policy.denied = EXPIRED
        await asyncio.sleep(31)
        done = await reply(talk)
        assert isinstance(done, PublishDone)
        assert done.status == DoneCode.EXPIRED


async def test_updates_of_a_publish_are_answered_in_order() -> None:
    """Though the policy takes longer for the first: an answer does not say which update it is for."""

    class Thoughtful(Script):
        async def decide(self, request: AccessRequest) -> Decision:
            self.takes = 3.0 if (1, b"slow") in request.tokens else 0.0
            if (1, b"bad") in request.tokens:
                return EXPIRED
            return await super().decide(request)

    policy, tracks = Thoughtful(Action.PUBLISH, Action.REQUEST_UPDATE), Taking()
    async with hostile(tracks=tracks, policy=policy) as (_, peer):
        talk = await peer.ask(Publish(peer.id(), OTHER, 1))
        assert isinstance(await reply(talk), RequestOk)
        await talk.say(
            RequestUpdate(peer.id(), with_token(b"slow")),
            RequestUpdate(peer.id(), with_token(b"bad")),
            RequestUpdate(peer.id(), Parameters()),
        )
        await asyncio.sleep(2.9)
        answers = [await reply(talk) for _ in range(3)]
        assert [type(answer) for answer in answers] == [RequestOk, RequestError, RequestOk]
        assert isinstance(answers[1], RequestError)
        assert answers[1].code == RequestCode.EXPIRED_AUTH_TOKEN
