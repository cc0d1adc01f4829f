"""Our publisher with aiomoqt's subscriber, and ours with its: draft-22 over raw QUIC, in separate processes.

aiomoqt needs Python 3.12 or newer and is not installed beside this project. MOQT_INTEROP_PYTHON names the
interpreter of a virtual environment that has aiomoqt 0.13.3 (`.ci/run` makes one); without it these tests are
skipped. The peers are scripts in peers/, and each says at its head what aiomoqt can't do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import moqt
from certs.make import CertificateFiles, make
from kvcs.identity import Descriptor, ScopeKey
from kvcs.publisher import Publication, Publisher
from kvcs.subscriber import Subscriber
from moqt.errors import DoneCode, RequestCode, RequestRejected
from moqt.filters import GroupOrder, Location, LocationFilter, RangeFilter, RangeKind
from moqt.names import FullTrackName, TrackNamespace
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import ObjectStatus

PYTHON = os.environ.get("MOQT_INTEROP_PYTHON")
PEERS = Path(__file__).parent / "peers"
DEADLINE = 60.0

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        not PYTHON,
        reason="MOQT_INTEROP_PYTHON names no Python 3.12 or newer with aiomoqt 0.13.3 (see .ci/run)",
    ),
]

NAMESPACE = (b"kvcs-1", bytes(range(16)), b"\x11" * 32, b"\x22" * 32, b"\xff" * 16)
NAME = FullTrackName(NAMESPACE, b"k.raw.s0")
GROUPS, OBJECTS = 4, 3
SIZES = (32, 70_000, 1)


def payload(group: int, object_id: int) -> bytes:
    """One that is larger than a stream's send buffer on either side, the others small."""
    size = 2 * 1024 * 1024 if (group, object_id) == (2, 1) else SIZES[object_id]
    return hashlib.shake_128(f"{group}.{object_id}".encode()).digest(size)


LOCATIONS = [(group, object_id) for group in range(GROUPS) for object_id in range(OBJECTS)]
DIGESTS = {location: hashlib.sha256(payload(*location)).hexdigest() for location in LOCATIONS}
BEFORE = [0, 1, 4, OBJECTS, len(LOCATIONS)]
"""How many Objects exist when the subscriber comes: none, some, a Group cut in two, whole Groups, all."""


class Peer:
    """A peer script that runs. `events` are the lines that were read from it so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []

    @classmethod
    @asynccontextmanager
    async def running(cls, script: str, *arguments: str | Path) -> AsyncIterator[Peer]:
        """Starts a script. On leaving it is told to stop, if it has not ended by itself, and waited for."""
        assert PYTHON is not None
        process = await asyncio.create_subprocess_exec(
            PYTHON,
            PEERS / script,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        peer = cls(process)
        try:
            yield peer
            await peer.end()
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def next(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            return None
        event: dict[str, Any] = json.loads(line)
        self.events.append(event)
        return event

    async def until(self, name: str) -> dict[str, Any]:
        """Reads on to the first event of this name."""
        while (event := await self.next()) is not None:
            if event["event"] == name:
                return event
        raise AssertionError(f"the peer ended without {name}: {self.events}")

    async def end(self) -> list[dict[str, Any]]:
        """Tells the peer to stop where it serves, reads to its end, and returns all of its events."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.close()
        while await self.next() is not None:
            pass
        assert await self.process.wait() == 0, self.events
        return self.events

    async def result(self) -> list[dict[str, Any]]:
        """Reads until the peer has ended by itself, and returns all of its events."""
        while await self.next() is not None:
            pass
        return await self.end()

    def objects(self) -> list[dict[str, Any]]:
        """The Objects with a payload."""
        return [event for event in self.events if event["event"] == "object" and not event["status"]]


def locations(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(event["group"], event["object"]) for event in events]


def digests(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {(event["group"], event["object"]): event["sha256"] for event in events}


def in_hex(namespace: TrackNamespace) -> list[str]:
    return [field.hex() for field in namespace]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make(tmp_path_factory.mktemp("interop"))


@asynccontextmanager
async def aiomoqt_serving(
    files: CertificateFiles, directory: Path, tracks: list[dict[str, Any]]
) -> AsyncIterator[tuple[Peer, str]]:
    """aiomoqt's publisher of these Tracks (as its script describes them), and its URI."""
    file = directory / "tracks.json"
    file.write_text(json.dumps({"tracks": tracks}))
    async with Peer.running(
        "aiomoqt_publisher.py", file, "--cert", files.certificate, "--key", files.key
    ) as peer:
        ready = await peer.until("ready")
        yield peer, f"moqt://127.0.0.1:{ready['port']}/moq"


def aiomoqt_publisher(files: CertificateFiles, directory: Path, before: int) -> Any:
    """aiomoqt's publisher of the one Track of these tests, which ends after its Objects."""
    groups = [
        {"group": group, "objects": [{"object": i, "hex": payload(group, i).hex()} for i in range(OBJECTS)]}
        for group in range(GROUPS)
    ]
    track = {"namespace": in_hex(NAMESPACE), "name": "k.raw.s0", "before": before, "groups": groups}
    return aiomoqt_serving(files, directory, [track])


def aiomoqt_client(
    script: str, uri: str, files: CertificateFiles, *arguments: str, track: FullTrackName = NAME
) -> Any:
    """aiomoqt's subscriber or fetcher."""
    namespace = ",".join(in_hex(track.namespace))
    return Peer.running(
        script, uri, "--ca", files.ca, "--namespace", namespace, "--name", track.name.decode(), *arguments
    )


class OurTrack:
    """The Track as our publisher has it."""

    def __init__(self) -> None:
        self.tracks = Tracks()
        self.track = Track(NAME, one_subgroup=True)
        self.tracks.add(self.track)
        self.tracks.announce(NAMESPACE)
        self.pending = list(LOCATIONS)

    def publish(self, count: int) -> None:
        """Publishes the next `count` Objects, and ends each Group and the Track that is whole then."""
        for _ in range(count):
            group, object_id = self.pending.pop(0)
            self.track.append(group, object_id, payload(group, object_id))
            if object_id == OBJECTS - 1:
                self.track.end_group(group, OBJECTS)
        if not self.pending:
            self.track.end(Location(GROUPS, 0))

    def close(self) -> None:
        """PUBLISH_DONE for every subscription."""
        self.tracks.remove(NAME, DoneCode.TRACK_ENDED)


@asynccontextmanager
async def our_publisher(files: CertificateFiles, tracks: Tracks) -> AsyncIterator[str]:
    async with moqt.serve(
        "127.0.0.1", 0, certificate=files.certificate, key=files.key, tracks=tracks
    ) as server:
        yield f"moqt://127.0.0.1:{server.port}/moq"


@pytest.mark.parametrize("before", BEFORE)
async def test_the_peers_agree_with_each_other(files: CertificateFiles, tmp_path: Path, before: int) -> None:
    """Where this fails, the other failures here say nothing about us."""
    async with asyncio.timeout(DEADLINE), aiomoqt_publisher(files, tmp_path, before) as (_, uri):
        async with aiomoqt_client("aiomoqt_subscriber.py", uri, files, "--discover", "4") as subscriber:
            events = await subscriber.result()
        assert Counter(locations(subscriber.objects())) == Counter(LOCATIONS)
        assert digests(subscriber.objects()) == DIGESTS
        assert events[-1] == {"event": "end", "complete": True, "objects": len(LOCATIONS)}
        async with aiomoqt_client(
            "aiomoqt_fetcher.py", uri, files, "--first-group", "1", "--last-group", "2", "--blocks", "2"
        ) as fetcher:
            await fetcher.result()
        assert locations(fetcher.objects()) == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("before", BEFORE)
async def test_aiomoqt_subscriber_gets_our_track_exactly_once(files: CertificateFiles, before: int) -> None:
    ours = OurTrack()
    ours.publish(before)
    async with (
        asyncio.timeout(DEADLINE),
        our_publisher(files, ours.tracks) as uri,
        aiomoqt_client("aiomoqt_subscriber.py", uri, files, "--discover", "4") as subscriber,
    ):
        found = await subscriber.until("namespace")
        assert found["namespace"] == in_hex(NAMESPACE)
        ok = await subscriber.until("subscribe_ok")
        assert ok["largest"] == (list(LOCATIONS[before - 1]) if before else None)
        if ours.pending:
            ours.publish(len(ours.pending))
        while len(subscriber.objects()) < len(LOCATIONS):
            assert await subscriber.next() is not None, subscriber.events
        ours.close()
        events = await subscriber.result()

    assert Counter(locations(subscriber.objects())) == Counter(LOCATIONS)
    assert digests(subscriber.objects()) == DIGESTS
    filled = [event for event in subscriber.objects() if event["source"] == "fill"]
    assert locations(filled) == LOCATIONS[:before]
    assert {event["status"] for event in events if event["event"] == "publish_done"} == {DoneCode.TRACK_ENDED}
    assert all(event["clean"] for event in events if event["event"] in ("stream_end", "fill_end"))
    assert events[-1] == {
        "event": "end",
        "complete": True,
        "objects": len(LOCATIONS),
    }  # by PUBLISH_DONE's count
    if before < len(LOCATIONS):
        statuses = [event for event in events if event["event"] == "object" and event["status"]]
        ends = {(group, OBJECTS): ObjectStatus.END_OF_GROUP for group in range(LOCATIONS[before][0], GROUPS)}
        ends[GROUPS, 0] = ObjectStatus.END_OF_TRACK
        assert {(event["group"], event["object"]): event["status"] for event in statuses} == ends


@pytest.mark.parametrize("order", ["ascending", "descending"])
async def test_aiomoqt_fetches_groups_from_our_publisher(files: CertificateFiles, order: str) -> None:
    ours = OurTrack()
    ours.publish(len(LOCATIONS))
    async with (
        asyncio.timeout(DEADLINE),
        our_publisher(files, ours.tracks) as uri,
        aiomoqt_client(
            "aiomoqt_fetcher.py", uri, files, "--first-group", "1", "--last-group", "2", "--order", order
        ) as fetcher,
    ):
        events = await fetcher.result()
    groups = (1, 2) if order == "ascending" else (2, 1)
    wanted = [(group, object_id) for group in groups for object_id in range(OBJECTS)]
    assert locations(fetcher.objects()) == wanted
    assert digests(fetcher.objects()) == {location: DIGESTS[location] for location in wanted}
    ok = next(event for event in events if event["event"] == "fetch_ok")
    assert ok["end"] == [2, OBJECTS - 1]
    assert events[-1] == {"event": "end", "complete": True, "objects": len(wanted)}


async def test_aiomoqt_fetches_the_first_objects_of_each_group(files: CertificateFiles) -> None:
    ours = OurTrack()
    ours.publish(len(LOCATIONS))
    async with (
        asyncio.timeout(DEADLINE),
        our_publisher(files, ours.tracks) as uri,
        aiomoqt_client(
            "aiomoqt_fetcher.py", uri, files, "--first-group", "0", "--last-group", "3", "--blocks", "2"
        ) as fetcher,
    ):
        events = await fetcher.result()
    assert locations(fetcher.objects()) == [
        (group, object_id) for group in range(GROUPS) for object_id in range(2)
    ]
    assert events[-1]["complete"]


@pytest.mark.parametrize("before", BEFORE)
async def test_we_get_a_track_of_aiomoqt_exactly_once(
    files: CertificateFiles, tmp_path: Path, before: int
) -> None:
    received: list[moqt.ReceivedObject] = []
    async with (
        asyncio.timeout(DEADLINE),
        aiomoqt_publisher(files, tmp_path, before) as (_, uri),
        moqt.connect(uri, ca=files.ca) as session,
        await session.subscribe(
            NAME,
            filter=LocationFilter.next_object(),
            fill=moqt.Fill(filter=LocationFilter.absolute_start(0, 0)),
        ) as subscription,
    ):
        assert subscription.largest == (Location(*LOCATIONS[before - 1]) if before else None)
        assert subscription.expects_fill == bool(before)
        async for item in subscription:
            if isinstance(item, moqt.StreamEnd):
                assert item.code is None
            elif isinstance(item, moqt.ReceivedObject):
                received.append(item)
        assert subscription.done is not None
        assert subscription.done.status == DoneCode.TRACK_ENDED

    objects = [item for item in received if item.status is ObjectStatus.NORMAL]
    assert Counter(item.location for item in objects) == Counter(
        Location(*location) for location in LOCATIONS
    )
    assert all(bytes(item.payload) == payload(item.location.group, item.location.object) for item in objects)
    assert [item.location for item in objects if item.fill] == [
        Location(*location) for location in LOCATIONS[:before]
    ]
    assert {item.location for item in received if item.status is ObjectStatus.END_OF_TRACK} == {
        Location(GROUPS, 0)
    }


@pytest.mark.parametrize("order", [GroupOrder.ASCENDING, GroupOrder.DESCENDING])
async def test_we_fetch_from_aiomoqt(files: CertificateFiles, tmp_path: Path, order: GroupOrder) -> None:
    received: list[moqt.ReceivedObject] = []
    async with (
        asyncio.timeout(DEADLINE),
        aiomoqt_publisher(files, tmp_path, len(LOCATIONS)) as (_, uri),
        moqt.connect(uri, ca=files.ca) as session,
        await session.fetch(
            NAME,
            filter=LocationFilter.groups(1, 2),
            order=order,
            range_filters=(RangeFilter(RangeKind.OBJECTID, ((0, 1),)),),
        ) as fetch,
    ):
        received += [item async for item in fetch if isinstance(item, moqt.ReceivedObject)]
        assert fetch.end is not None
        assert fetch.end.end == Location(2, OBJECTS - 1)
    groups = (1, 2) if order is GroupOrder.ASCENDING else (2, 1)
    assert [item.location for item in received] == [Location(group, i) for group in groups for i in range(2)]
    assert all(bytes(item.payload) == payload(item.location.group, item.location.object) for item in received)


async def test_we_discover_and_ask_about_a_track_of_aiomoqt(files: CertificateFiles, tmp_path: Path) -> None:
    async with (
        asyncio.timeout(DEADLINE),
        aiomoqt_publisher(files, tmp_path, len(LOCATIONS)) as (_, uri),
        moqt.connect(uri, ca=files.ca) as session,
    ):
        async with await session.subscribe_namespace(NAMESPACE[:4]) as watch:
            event = await anext(aiter(watch))
        assert (event.namespace, event.present) == (NAMESPACE, True)
        status = await session.track_status(NAME)
        assert status.largest == Location(*LOCATIONS[-1])
        with pytest.raises(RequestRejected) as rejection:
            await session.subscribe(FullTrackName(NAMESPACE, b"nothing"))
        assert rejection.value.code == RequestCode.DOES_NOT_EXIST


LAYERS, BLOCKS, BLOCK_TOKENS = 4, 3, 16
DIGEST = "0" * 64
DESCRIPTOR = Descriptor.parse(
    {
        "profile": "kvsp-lp1",
        "model": "interop",
        "model_sha256": DIGEST,
        "tokenizer_sha256": DIGEST,
        "adapter_sha256": None,
        "attention": "gqa",
        "layers": LAYERS,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": "float16",
        "block_tokens": BLOCK_TOKENS,
        "layout": "thd-le",
        "position": {"kind": "none"},
        "window": 0,
        "kv_scales_sha256": None,
    }
)
SCOPE_KEY = ScopeKey(bytes(range(32)))
TOKENS = list(range(1000, 1000 + BLOCKS * BLOCK_TOKENS))


async def published_cache() -> tuple[Publication, list[tuple[NDArray[np.float16], NDArray[np.float16]]]]:
    """A completed publication, and K and V of its layers."""
    generator = np.random.default_rng(22)
    shape = (len(TOKENS), 2, 64)
    layers = [
        (generator.random(shape).astype(np.float16), generator.random(shape).astype(np.float16))
        for _ in range(LAYERS)
    ]
    publication = Publisher(DESCRIPTOR, SCOPE_KEY).publish(TOKENS)
    for layer, (k, v) in enumerate(layers):
        await publication.segment.put_layer(layer, k, v)
    return publication, layers


def stored(track: Track) -> dict[tuple[int, int], bytes]:
    """The payload of every Object of one of our Tracks, by Group and Object ID."""
    assert track.largest is not None
    items = track.objects(Location(0, 0), track.largest)
    return {(item.location.group, item.location.object): b"".join(item.payload) for item in items}


async def test_aiomoqt_subscriber_gets_a_cache_of_kvcs(files: CertificateFiles) -> None:
    publication, _ = await published_cache()
    tracks = publication.publisher.tracks
    async with asyncio.timeout(DEADLINE), our_publisher(files, tracks) as uri:
        for track in tracks:
            payloads = stored(track)
            async with aiomoqt_client(
                "aiomoqt_subscriber.py",
                uri,
                files,
                *("--fill", "groups:1" if track.name.name == b"manifest" else "all"),
                *("--objects", "1" if track.name.name == b"manifest" else str(len(payloads))),
                track=track.name,
            ) as subscriber:
                await subscriber.result()
            wanted = {location: hashlib.sha256(payloads[location]).hexdigest() for location in payloads}
            if track.name.name == b"manifest":
                wanted = dict([max(wanted.items())])
            assert digests(subscriber.objects()) == wanted
            assert len(subscriber.objects()) == len(wanted)


@pytest.mark.parametrize("blocks", [BLOCKS, 2])
async def test_kvcs_subscriber_gets_a_cache_from_aiomoqt(
    files: CertificateFiles, tmp_path: Path, blocks: int
) -> None:
    """Discovery, manifest, and layers; with fewer blocks by OBJECTID_FILTER."""
    publication, layers = await published_cache()
    tracks = [
        {
            "namespace": in_hex(track.name.namespace),
            "name": track.name.name.decode(),
            "end_of_track": track.ended is not None,
            "groups": [
                {"group": group, "objects": [{"object": object_id, "hex": data.hex()}]}
                for (group, object_id), data in stored(track).items()
            ],
        }
        for track in publication.publisher.tracks
    ]
    async with (
        asyncio.timeout(DEADLINE),
        aiomoqt_serving(files, tmp_path, tracks) as (peer, uri),
        moqt.connect(uri, ca=files.ca) as session,
        await Subscriber(session, DESCRIPTOR, SCOPE_KEY).receive(TOKENS, blocks=blocks) as reception,
    ):
        received = [layer async for layer in reception]
        assert reception.publication == publication.name
        assert not reception.missing
        assert not reception.rejected
    assert [layer.layer for layer in received] == list(range(LAYERS))
    for layer, (k, v) in zip(received, layers, strict=True):
        assert layer.v is not None
        assert layer.k.tobytes() == k[: blocks * BLOCK_TOKENS].tobytes()
        assert layer.v.tobytes() == v[: blocks * BLOCK_TOKENS].tobytes()
    fetched = {event["name"]: event["objects"] for event in peer.events if event["event"] == "fetched"}
    assert fetched == dict.fromkeys(("k.raw.s0", "v.raw.s0"), LAYERS * blocks)
