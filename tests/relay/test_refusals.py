"""Publishers that refuse, break off or leave: the next one is asked; what is answered when none is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from moqt import (
    ConnectionLost,
    FullTrackName,
    Location,
    RequestCode,
    RequestRejected,
    Session,
    StreamReset,
    Track,
    Tracks,
)
from moqt.errors import DeadlineExceeded, MoqtError, RequestRefused
from moqt.publishing import Publishing
from moqt.quic.link import pair
from moqt.relay import Relay
from moqt.relay.feed import Feed
from moqt.relay.refusals import refusal
from moqt.requests import RequestStream
from moqt.track import Wanted
from moqt.wire import Fetch, Redirect
from tests.moqt.scene import EVERYTHING, NAMESPACE, check_exactly_once, collect, filled, make_track, objects
from tests.relay.network import join, network

pytestmark = pytest.mark.virtual

SIZE = 20_000


class Refusing(Tracks):
    """Offers a namespace and none of its Tracks."""

    def __init__(self, code: RequestCode) -> None:
        super().__init__()
        self.code = code
        self.asked = 0
        self.announce(NAMESPACE)

    async def find(
        self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0, wanted: Wanted | None = None
    ) -> Track:
        self.asked += 1
        raise RequestRefused(self.code, "not now")


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (RequestCode.UNAUTHORIZED, RequestCode.INTERNAL_ERROR),
        (RequestCode.TIMEOUT, RequestCode.TIMEOUT),
        (RequestCode.EXCESSIVE_LOAD, RequestCode.EXCESSIVE_LOAD),
        (RequestCode.DOES_NOT_EXIST, RequestCode.DOES_NOT_EXIST),
        (RequestCode.UNSUPPORTED_EXTENSION, RequestCode.UNSUPPORTED_EXTENSION),
        (RequestCode.GOING_AWAY, RequestCode.DOES_NOT_EXIST),
        (RequestCode.EXPIRED_AUTH_TOKEN, RequestCode.INTERNAL_ERROR),
        (RequestCode.UNINTERESTED, RequestCode.INTERNAL_ERROR),
    ],
)
async def test_what_a_publisher_says_of_the_track_is_passed_on(
    code: RequestCode, answer: RequestCode
) -> None:
    """What it says of our own request, or of itself, is not (moqt 17.2)."""
    async with network() as net:
        await net.publish(Refusing(code))
        net.links[0].cut()
        await asyncio.sleep(1)
        with pytest.raises(RequestRejected) as caught:
            await join(net.sessions[0], FullTrackName(NAMESPACE, b"k"))
        assert caught.value.code == answer


@pytest.mark.parametrize("uri", ["", "moqt://elsewhere:4433/"])
async def test_redirect_is_passed_on(uri: str) -> None:
    """moqt 15 #20, 17.2: to a subscriber; an upstream, which is a server, gets no URI (moqt 20 #13)."""
    target = Redirect(uri, FullTrackName((b"other",), b"k"))

    class Elsewhere(Tracks):
        async def find(
            self, name: FullTrackName, asker: object, *, rendezvous: float = 0.0, wanted: Wanted | None = None
        ) -> Track:
            raise RequestRefused(RequestCode.REDIRECT, "there", target)

    elsewhere = Elsewhere()
    elsewhere.announce((b"mine",))
    name = FullTrackName((b"mine",), b"k")
    async with network(relays=1) as net:
        link = pair()
        client = Session(link.client, tracks=net.relays[0].upward, announce=True)
        upstream = Session(link.server, tracks=elsewhere, announce=False)
        await asyncio.gather(client.start(), upstream.start())
        try:
            async with net.relays[0].upstream(client):
                with pytest.raises(RequestRejected) as caught:
                    await net.sessions[0].subscribe(name)
                assert caught.value.redirect == target
        finally:
            await asyncio.gather(client.close(), upstream.close())


async def test_an_upstream_is_not_redirected_to_a_uri() -> None:
    relay = Relay()
    feed = Feed(relay, FullTrackName((b"n",), b"t"))
    to = Redirect("moqt://elsewhere", FullTrackName((b"n",), b"t"))
    for upward, code in ((True, RequestCode.DOES_NOT_EXIST), (False, RequestCode.REDIRECT)):
        feed._errors = {object(): RequestRejected(RequestCode.REDIRECT, "there", redirect=to)}  # type: ignore[dict-item]  # Any key will do.
        assert feed._refusal(feed._errors, waited=False, upward=upward).code == code


def test_the_answer_after_several_failures() -> None:
    missing = RequestRejected(RequestCode.DOES_NOT_EXIST, "no")
    late, lost = DeadlineExceeded("a reply", 5.0), ConnectionLost("gone")

    def code(*errors: MoqtError) -> RequestCode | None:
        answer = refusal(errors)
        return None if answer is None else answer.code

    assert code() is None
    assert code(missing, missing) == RequestCode.DOES_NOT_EXIST
    assert code(missing, late) == code(late, missing) == RequestCode.TIMEOUT
    assert code(missing, lost) == code(StreamReset(0)) == RequestCode.INTERNAL_ERROR
    assert code(RequestRejected(0x7777, "unknown")) == RequestCode.INTERNAL_ERROR


@pytest.mark.parametrize("request_", ["SUBSCRIBE", "FETCH"])
async def test_one_of_two_publishers_refuses(request_: str) -> None:
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 2, SIZE)
    refusing = Refusing(RequestCode.INTERNAL_ERROR)
    async with network(track, jitter=0.004) as net:
        await net.publish(refusing, latency=0.001)
        await asyncio.sleep(1)
        if request_ == "SUBSCRIBE":
            subscription = await join(net.sessions[0], track.name)
            net.end(track)
            items = await collect(subscription)
        else:
            items = await collect(await net.sessions[0].fetch(track.name, filter=EVERYTHING))
        assert refusing.asked
        check_exactly_once(track, objects(items))


async def refuse(_: Publishing, stream: RequestStream, __: Fetch, *more: object) -> None:
    raise RequestRefused(RequestCode.INTERNAL_ERROR, "broken")


async def reset(_: Publishing, stream: RequestStream, __: Fetch, *more: object) -> None:
    stream.cancel()


async def close(publishing: Publishing, stream: RequestStream, _: Fetch, *more: object) -> None:
    publishing.session.connection.close(1, "a fault")


async def say_nothing(_: Publishing, stream: RequestStream, __: Fetch, *more: object) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("fault", [refuse, reset, close, say_nothing])
async def test_a_publisher_that_fails_before_fetch_ok(
    fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is asked; without one, the answer is an error within its bound."""
    track = make_track(b"k", one_subgroup=True)
    filled(track, range(3), 2, SIZE)
    copy = Track(track.name, one_subgroup=True)
    filled(copy, range(3), 2, SIZE)
    tracks = Tracks()
    tracks.add(copy)
    tracks.announce(NAMESPACE)
    async with network(track) as net:
        first = net.publisher
        honest = Publishing.fetch

        async def faulty(publishing: Publishing, *arguments: object) -> None:
            if publishing.session is first:
                await fault(publishing, *arguments)  # type: ignore[misc]  # Each fault is a coroutine function.
            else:
                await honest(publishing, *arguments)  # type: ignore[arg-type]  # As they came.

        monkeypatch.setattr(Publishing, "fetch", faulty)
        await net.publish(tracks)
        await asyncio.sleep(1)
        async with asyncio.timeout(8):
            fetch = await net.sessions[0].fetch(track.name, filter=EVERYTHING)
            check_exactly_once(track, objects(await collect(fetch)))
        assert fetch.end is not None
        assert fetch.end.end == Location(2, 1)
