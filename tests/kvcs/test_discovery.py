"""Finding publications from the tokens alone (kvcs 7.1, 14 #4 to #6)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvcs.discovery import (
    ANSWER_WAIT,
    DISCOVERY_WAIT,
    HEAD_START,
    PARALLEL_PREFIXES,
    Found,
    discover,
    discover_in_scope,
)
from kvcs.identity import ScopeKey, block_keys
from kvcs.names import MANIFEST, PublicationName, content_prefix, scope_prefix
from kvcs.publisher import Publisher
from kvcs.subscriber import RANKING, NothingFound
from moqt.errors import ConnectionLost, DoneCode, RequestCode, RequestRefused, RequestRejected
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.namespaces import NamespaceWatch
from moqt.publishing import Publishing
from moqt.quic.virtual import run_virtual
from moqt.session import Session
from moqt.track import Track
from moqt.wire import SubscribeNamespace
from tests.kvcs.stage import (
    CACHE,
    MODEL,
    SCOPE_KEY,
    TOKENS,
    Stage,
    Wiretap,
    check_layers,
    descriptor,
    make_cache,
    now,
    put_layers,
    stage,
)

pytestmark = pytest.mark.virtual

KEYS = block_keys(SCOPE_KEY, MODEL, TOKENS)
COMPAT_ID = MODEL.compat_id
SCOPE_ID = SCOPE_KEY.scope_id


async def find(scene: Stage, tokens: list[int] = TOKENS, **options: float) -> list[Found]:
    return await discover(scene.here, MODEL, SCOPE_KEY, tokens, **options)  # type: ignore[arg-type]  # options of any kind


def prefixes(tap: Wiretap) -> list[tuple[bytes, ...]]:
    """The namespace prefixes that the subscriber asked for."""
    requests = tap.requests(from_client=True)
    return [request.prefix for request in requests if isinstance(request, SubscribeNamespace)]


@pytest.mark.requirement("R7.1a", "R3.1c")
@pytest.mark.parametrize("publisher_dials", [False, True])
async def test_four_fields_find_the_publications_of_a_prefix(publisher_dials: bool) -> None:
    taps: list[Wiretap] = []
    async with stage(publisher_dials=publisher_dials, tap=lambda link: taps.append(Wiretap(link))) as scene:
        publisher = scene.publisher()
        names = [publisher.publish(TOKENS).name for _ in range(3)]
        assert await find(scene) == [Found(name, 3) for name in names]
    requests = taps[0].requests(from_client=not publisher_dials)
    asked = [request.prefix for request in requests if isinstance(request, SubscribeNamespace)]
    assert asked[0] == (b"kvcs-1", SCOPE_ID, COMPAT_ID, KEYS[-1])
    assert len({name.publication_id for name in names}) == 3


@pytest.mark.requirement("R3.1c")
async def test_two_fields_find_all_of_the_scope() -> None:
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publisher = scene.publisher()
        short, whole = publisher.publish(TOKENS[:2]), publisher.publish(TOKENS)
        again = publisher.publish(TOKENS)
        publisher.publish([1, 2, 3, 4])  # other tokens
        scene.publisher(descriptor(model="test/other")).publish(TOKENS)
        Publisher(MODEL, ScopeKey(b"another scope key"), tracks=scene.tracks).publish(TOKENS)
        found = await discover_in_scope(scene.here, MODEL, SCOPE_KEY, TOKENS)
    assert found == [Found(whole.name, 3), Found(again.name, 3), Found(short.name, 1)]
    assert prefixes(taps[0]) == [(b"kvcs-1", SCOPE_ID)] == [scope_prefix(SCOPE_ID)]


@pytest.mark.requirement("R7.1c")
async def test_the_longest_prefix_that_has_any() -> None:
    """The longest is asked for first, and goes before those that answer as soon."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        publisher = scene.publisher()
        one = publisher.publish(TOKENS[:2])
        assert await find(scene) == [Found(one.name, 1)]
        two = publisher.publish(TOKENS[:4])
        assert await find(scene) == [Found(two.name, 2)]
        assert await find(scene, TOKENS[:2]) == [Found(one.name, 1)]
        three = publisher.publish(TOKENS)
        began = now()
        assert await find(scene) == [Found(three.name, 3)]
        assert now() < began + 0.1  # An answer for the longest prefix ends the wait.
        assert await find(scene, [*TOKENS, 7, 8, 9]) == [Found(three.name, 3)]
        assert await find(scene, [*TOKENS[:4], 0, 0]) == [Found(two.name, 2)]
    in_order = [content_prefix(SCOPE_ID, COMPAT_ID, key) for key in reversed(KEYS)]
    assert prefixes(taps[0])[:3] == in_order


LONG_PROMPT = [*TOKENS[:2], *range(2 * 2 * PARALLEL_PREFIXES)]


@pytest.mark.requirement("R7.1c", "R3.1c")
async def test_a_short_prefix_of_a_long_prompt() -> None:
    """The longest prefix, and then the scope as a whole: no request for each of them, and one wait."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        one = scene.publisher().publish(TOKENS[:2])
        scene.publisher().publish(TOKENS[2:])
        scene.publisher(descriptor(model="test/other")).publish(TOKENS[:2])
        began = now()
        assert await find(scene, LONG_PROMPT, min_blocks=2) == []
        assert now() < began + DISCOVERY_WAIT + 0.2
        began = now()
        assert await find(scene, LONG_PROMPT) == [Found(one.name, 1)]
        assert now() < began + 0.4
        two = [scene.publisher().publish(LONG_PROMPT[:4]).name for _ in range(2)]
        assert await find(scene, LONG_PROMPT) == [Found(name, 2) for name in two]
        whole = scene.publisher().publish(LONG_PROMPT)
        began = now()
        assert await find(scene, LONG_PROMPT) == [Found(whole.name, len(LONG_PROMPT) // 2)]
        assert now() < began + 0.1
    asked = list(dict.fromkeys(prefixes(taps[0])))
    keys = block_keys(SCOPE_KEY, MODEL, LONG_PROMPT)
    assert asked == [content_prefix(SCOPE_ID, COMPAT_ID, keys[-1]), scope_prefix(SCOPE_ID)]


async def test_publications_of_others_may_end_while_the_scope_is_asked_for() -> None:
    async with stage() as scene:
        other = scene.publisher().publish(TOKENS[2:])
        task = asyncio.create_task(find(scene, LONG_PROMPT, wait=1.0))
        await asyncio.sleep(0.5)
        other.close()
        assert await task == []


@pytest.mark.requirement("R7.1c")
async def test_a_long_prompt_where_the_scope_can_not_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many prefixes at a time, the longest first; as few as `min_blocks` allows."""
    taps: list[Wiretap] = []
    ask = Session.subscribe_namespace

    async def narrow(session: Session, prefix: tuple[bytes, ...], **more: Any) -> NamespaceWatch:
        if len(prefix) < 4:
            raise RequestRejected(RequestCode.NAMESPACE_TOO_LARGE, "ask for less")
        return await ask(session, prefix, **more)

    monkeypatch.setattr(Session, "subscribe_namespace", narrow)
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        one = scene.publisher().publish(TOKENS[:2])
        assert await find(scene, LONG_PROMPT, min_blocks=2) == []
        asked = list(dict.fromkeys(prefixes(taps[0])))
        assert len(asked) == 2 * PARALLEL_PREFIXES
        assert now() < 2 * (DISCOVERY_WAIT + 0.2)
        assert await find(scene, LONG_PROMPT) == [Found(one.name, 1)]
    keys = block_keys(SCOPE_KEY, MODEL, LONG_PROMPT)
    assert [prefix[3] for prefix in dict.fromkeys(prefixes(taps[0]))] == keys[::-1]


@pytest.mark.requirement("R7.1c")
@pytest.mark.parametrize("latency", [0.0001, 0.04])
async def test_shorter_prefixes_are_not_asked_for_where_the_longest_is_published(latency: float) -> None:
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link)), latency=latency) as scene:
        whole = scene.publisher().publish(TOKENS)
        assert await find(scene) == [Found(whole.name, 3)]
    assert len(prefixes(taps[0])) == 1


@pytest.mark.requirement("R7.1c")
@pytest.mark.parametrize(("latency", "longest"), [(0.0001, 0.0002), (0.04, 0.08), (0.5, HEAD_START)])
async def test_shorter_prefixes_are_asked_for_when_the_longest_was_answered_or_is_late(
    latency: float, longest: float
) -> None:
    async with stage(latency=latency) as scene:
        two = scene.publisher().publish(TOKENS[:4])
        began = now()
        assert await find(scene, wait=0.0) == [Found(two.name, 2)]
        assert now() - began == pytest.approx(longest + ANSWER_WAIT + 2 * latency, abs=0.001)


async def test_nothing_is_found_after_a_stated_time() -> None:
    async with stage() as scene:
        scene.publisher().publish([1, 2, 3, 4])
        began = now()
        assert await find(scene) == []
        assert DISCOVERY_WAIT < now() - began < DISCOVERY_WAIT + 0.1
        began = now()
        with pytest.raises(NothingFound, match="no publication was found"):
            await scene.subscriber().receive(TOKENS, wait=3.0)
        assert 3.0 < now() - began < 3.1
        with pytest.raises(NothingFound, match="1 tokens fill no block of 2"):
            await scene.subscriber().receive(TOKENS[:1])
        with pytest.raises(NothingFound, match="no publication was found"):
            await scene.subscriber().receive(TOKENS, publications=[])


async def test_a_publication_that_is_announced_while_we_wait() -> None:
    async with stage() as scene:
        task = asyncio.create_task(find(scene, wait=10.0))
        await asyncio.sleep(5)
        publication = scene.publisher().publish(TOKENS)
        assert await task == [Found(publication.name, 3)]
        assert now() < 5.1


async def test_a_publication_that_was_withdrawn_is_not_found() -> None:
    async with stage() as scene:
        gone, stays = scene.publisher().publish(TOKENS), scene.publisher().publish(TOKENS[:4])
        gone.close()
        assert await find(scene) == [Found(stays.name, 2)]
        task = asyncio.create_task(find(scene, [*TOKENS, 1, 2], wait=3.0))
        await asyncio.sleep(1)
        stays.close()
        assert await task == []


JUNK = [
    (b"kvcs-1", SCOPE_ID, COMPAT_ID, KEYS[-1]),
    (b"kvcs-1", SCOPE_ID, COMPAT_ID, KEYS[-1], b"x" * 15),
    (b"kvcs-1", SCOPE_ID, COMPAT_ID, KEYS[-1], b"x" * 17),
    (b"kvcs-1", SCOPE_ID, COMPAT_ID, KEYS[-1], b"x" * 16, b"more"),
]
JUNK_OF_SCOPE = [
    (b"kvcs-1", SCOPE_ID),
    (b"kvcs-1", SCOPE_ID, b"short", KEYS[-1], b"x" * 16),
    (b"kvcs-1", SCOPE_ID, COMPAT_ID, b"k" * 31, b"x" * 16),
]


async def test_namespaces_of_another_shape_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """kvcs 3.1. They neither count as an answer nor hide one, and the log says why."""
    async with stage() as scene:
        for namespace in JUNK:
            scene.tracks.announce(namespace)
        short = scene.publisher().publish(TOKENS[:2])
        with caplog.at_level(logging.WARNING, "kvcs.discovery"):
            assert await find(scene) == [Found(short.name, 1)]
        assert "a KVCS namespace has 5 fields, got 4" in caplog.text
        assert "has 16 octets, got 15" in caplog.text
        whole = scene.publisher().publish(TOKENS)
        for namespace in JUNK_OF_SCOPE:
            scene.tracks.announce(namespace)
        assert await find(scene) == [Found(whole.name, 3)]
        found = await discover_in_scope(scene.here, MODEL, SCOPE_KEY, TOKENS)
        assert found == [Found(whole.name, 3), Found(short.name, 1)]


# Which one is taken (kvcs 14 #5)


async def test_a_complete_publication_goes_before_one_that_is_not() -> None:
    async with stage() as scene:
        publisher = scene.publisher()
        publications = [publisher.publish(TOKENS) for _ in range(3)]
        await put_layers(publications[1].segment, CACHE)
        await put_layers(publications[2].segment, CACHE)
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.publication == publications[1].name
            check_layers([layer async for layer in reception], CACHE)


async def test_the_first_announced_goes_first_otherwise() -> None:
    async with stage() as scene:
        publisher = scene.publisher()
        publications = [publisher.publish(TOKENS) for _ in range(3)]
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.publication == publications[0].name
        others = [publication.name for publication in publications[:0:-1]]
        async with await scene.subscriber().receive(TOKENS, publications=others) as reception:
            assert reception.publication == others[0]


async def test_a_publication_without_a_usable_codec_is_passed_over() -> None:
    """kvcs 14 #5 and #11."""
    async with stage() as scene:
        packed = scene.publisher(codecs=["x-shuffle-zlib"]).publish(TOKENS)
        await put_layers(packed.segment, CACHE)
        began = now()
        with pytest.raises(
            NothingFound, match=r"no usable codec: k\.x-shuffle-zlib\.s0, v\.x-shuffle-zlib\.s0"
        ):
            await scene.subscriber(codecs=["raw"]).receive(TOKENS)
        assert now() < began + DISCOVERY_WAIT + 0.3
        raw = scene.publisher().publish(TOKENS)
        async with await scene.subscriber(codecs=["raw"]).receive(TOKENS) as reception:
            assert reception.publication == raw.name
        async with await scene.subscriber(codecs=["raw", "x-shuffle-zlib"]).receive(TOKENS) as reception:
            assert reception.publication == packed.name  # It is complete.


# Publications of no use (kvcs 14 #6)


def announce_only(scene: Stage) -> PublicationName:
    """Announce a publication that has no tracks."""
    name = PublicationName.new(SCOPE_ID, COMPAT_ID, KEYS[-1])
    scene.tracks.announce(name.namespace)
    return name


def announce_silent(scene: Stage) -> PublicationName:
    """Announce a publication whose manifest track has nothing in it."""
    name = announce_only(scene)
    scene.tracks.add(Track(FullTrackName(name.namespace, MANIFEST), priority=0))
    return name


async def test_a_publication_without_a_manifest_is_not_used() -> None:
    async with stage() as scene:
        name = announce_only(scene)
        with pytest.raises(NothingFound, match=f"{name.publication_id.hex()}: .*DOES_NOT_EXIST"):
            await scene.subscriber(patience=4.0).receive(TOKENS)
        silent = announce_silent(scene)
        began = now()
        with pytest.raises(NothingFound, match=f"{silent.publication_id.hex()}: no manifest came within 4 s"):
            await scene.subscriber(patience=4.0).receive(TOKENS)
        assert 4.0 < now() - began < 4.2


async def test_publications_of_no_use_hold_up_no_other() -> None:
    async with stage() as scene:
        announce_only(scene)
        announce_silent(scene)
        good = scene.publisher().publish(TOKENS)
        await put_layers(good.segment, CACHE)
        began = now()
        async with await scene.subscriber().receive(TOKENS) as reception:
            assert reception.publication == good.name
            assert now() < began + RANKING + 0.2
            check_layers([layer async for layer in reception], CACHE)


@pytest.mark.requirement("R7.1c")
async def test_publications_of_no_use_hide_no_shorter_prefix() -> None:
    """A stale announcement of the full prefix, one of two blocks in no codec of ours, and a good one."""
    async with stage() as scene:
        announce_only(scene)
        scene.publisher(codecs=["x-shuffle-zlib"]).publish(TOKENS[:4])
        good = scene.publisher().publish(TOKENS[:2])
        cache = make_cache(MODEL, 2)
        await put_layers(good.segment, cache)
        async with await scene.subscriber(codecs=["raw"]).receive(TOKENS) as reception:
            assert reception.publication == good.name
            assert reception.blocks == 1
            check_layers([layer async for layer in reception], cache)
        good.close()
        with pytest.raises(NothingFound) as caught:
            await scene.subscriber(codecs=["raw"]).receive(TOKENS)
        assert "DOES_NOT_EXIST" in str(caught.value)
        assert "no usable codec" in str(caught.value)


async def test_a_manifest_track_that_ends_without_a_manifest() -> None:
    async with stage() as scene:
        silent = announce_silent(scene)
        task = asyncio.create_task(scene.subscriber().receive(TOKENS))
        await asyncio.sleep(1)
        track = scene.tracks.get(FullTrackName(silent.namespace, MANIFEST))
        assert track is not None
        track.close(DoneCode.TRACK_ENDED)
        with pytest.raises(NothingFound, match="ended before a manifest came"):
            await task
        assert now() < 1.2 + DISCOVERY_WAIT


# What the peer refuses, and what breaks


async def test_two_searches_at_once_in_one_session() -> None:
    """Prefixes must not overlap in one session (moqt 11), so one waits for the other."""
    async with stage(jitter=0.02, seed=7) as scene:
        name = scene.publisher().publish(TOKENS).name
        results = await asyncio.gather(*(find(scene) for _ in range(4)))
        assert results == [[Found(name, 3)]] * 4
        whole, found = await asyncio.gather(
            discover_in_scope(scene.here, MODEL, SCOPE_KEY, TOKENS), find(scene)
        )
        assert whole == found == [Found(name, 3)]


async def test_an_overlap_that_lasts_is_reported() -> None:
    async with (
        stage(subscriber_limits=Limits(reply_deadline=2.0)) as scene,
        await scene.here.subscribe_namespace(scope_prefix(SCOPE_ID)),
    ):
        with pytest.raises(RequestRejected, match="PREFIX_OVERLAP"):
            await find(scene)
        assert now() < 2.7


@pytest.mark.parametrize("refused", [{0}, {1, 2}, {0, 1, 2}])
async def test_prefixes_that_the_peer_refuses(refused: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found all the same; only if all are refused that is an error."""
    serve = Publishing.subscribe_namespace

    async def choose(self, stream, message, authority) -> None:  # type: ignore[no-untyped-def]  # as the original
        if KEYS.index(message.prefix[3]) in refused:
            raise RequestRefused(RequestCode.UNAUTHORIZED, "not for you")
        await serve(self, stream, message, authority)

    monkeypatch.setattr(Publishing, "subscribe_namespace", choose)
    async with stage() as scene:
        names = [scene.publisher().publish(TOKENS[: 2 * blocks]).name for blocks in (1, 2, 3)]
        if len(refused) == 3:
            with pytest.raises(RequestRejected, match="not for you"):
                await find(scene)
        else:
            best = max({0, 1, 2} - refused)
            assert await find(scene) == [Found(names[best], best + 1)]


@pytest.mark.parametrize("after", [0.005, 0.015, 0.1, 0.4])
async def test_the_connection_is_lost_during_discovery(after: float) -> None:
    async with stage() as scene:
        asyncio.get_running_loop().call_later(after, scene.link.cut)
        with pytest.raises(ConnectionLost):
            await find(scene)
        assert now() < 0.5


@pytest.mark.parametrize("named", [False, True])
async def test_the_connection_is_lost_before_the_manifest_came(named: bool) -> None:
    async with stage() as scene:
        name = announce_silent(scene)
        asyncio.get_running_loop().call_later(1.0, scene.link.cut)
        with pytest.raises(ConnectionLost):
            await scene.subscriber().receive(TOKENS, publications=[name] if named else None)
        assert now() < 1.1


async def test_a_watch_that_breaks_off_takes_its_namespaces_with_it() -> None:
    """moqt 11. The prefix is asked for again, and what was withdrawn meanwhile is not found."""
    taps: list[Wiretap] = []
    async with stage(tap=lambda link: taps.append(Wiretap(link))) as scene:
        gone = scene.publisher().publish(TOKENS)
        task = asyncio.create_task(discover_in_scope(scene.here, MODEL, SCOPE_KEY, TOKENS, wait=3.0))
        await asyncio.sleep(1)
        taps[0].change = lambda piece: None if not piece.from_client and not piece.stream & 2 else piece
        gone.close()
        await asyncio.sleep(0.005)
        taps[0].change = None
        assert await task == []
    assert len(prefixes(taps[0])) > 1


def test_cancelled_at_any_moment() -> None:
    """No task is left (the stage looks), and no prefix stays claimed at the peer."""

    async def cancelled(after: float) -> None:
        async with stage() as scene:
            name = scene.publisher().publish(TOKENS[:2]).name
            task = asyncio.create_task(find(scene))
            await asyncio.sleep(after)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            await asyncio.sleep(0.05)
            async with await scene.here.subscribe_namespace(scope_prefix(SCOPE_ID)):
                pass
            await asyncio.sleep(0.05)
            assert await find(scene) == [Found(name, 1)]

    for step in range(28):
        run_virtual(cancelled(step * 0.018))
