"""A publisher and a subscriber with a simulated network between them, on virtual time."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcs.assembly import Layer
from kvcs.codecs import CODECS
from kvcs.identity import Descriptor, ScopeKey, Tokens
from kvcs.layout import NUMPY_DTYPES, Order, Tensor, to_blocks
from kvcs.manifest import Manifest
from kvcs.names import Component, DataTrack
from kvcs.payload import data_digest, seal, token_start
from kvcs.publisher import Publication, Publisher, Segment
from kvcs.subscriber import Reception, Subscriber
from moqt.filters import Location
from moqt.limits import Limits
from moqt.names import FullTrackName
from moqt.quic.api import QuicOptions
from moqt.quic.link import Link, pair
from moqt.quic.memory import MemoryConnection
from moqt.session import Session
from moqt.track import StoredObject, Track
from moqt.tracks import Tracks
from moqt.wire import (
    DataStreamDecoder,
    Event,
    MessageDecoder,
    ObjectHeader,
    PayloadChunk,
    Request,
    Token,
    read_vi64,
)

CONTROL_STREAM = 0x2F00
SCOPE_KEY = ScopeKey(bytes(range(32)))
Cache = list[tuple[Tensor, Tensor]]
"""K and V of each layer."""


def descriptor(**members: Any) -> Descriptor:
    """A small model: 4 layers, blocks of 2 tokens, Objects of 16 octets of Data."""
    return Descriptor.parse(
        {
            "profile": "kvsp-lp1",
            "model": "test/tiny",
            "model_sha256": "11" * 32,
            "tokenizer_sha256": "22" * 32,
            "adapter_sha256": None,
            "attention": "mha",
            "layers": 4,
            "kv_heads": 2,
            "head_dim": 2,
            "dtype": "float16",
            "block_tokens": 2,
            "layout": "thd-le",
            "position": {"kind": "none"},
            "window": 0,
            "kv_scales_sha256": None,
            **members,
        }
    )


MODEL = descriptor()
TOKENS = list(range(100, 106))
"""Three blocks of MODEL."""


def make_cache(model: Descriptor, tokens: int, *, seed: int = 0) -> Cache:
    """Random bits in the dtype of `model`, for so many tokens."""
    generator = np.random.default_rng(seed)
    dtype = NUMPY_DTYPES[model.dtype]

    def tensor(dim: int) -> Tensor:
        shape = (tokens, model.kv_heads, dim)
        octets = generator.bytes(tokens * model.kv_heads * dim * dtype.itemsize)
        return np.frombuffer(octets, dtype).reshape(shape)

    return [(tensor(model.head_dim), tensor(model.v_head_dim)) for _ in range(model.layers)]


CACHE = make_cache(MODEL, len(TOKENS))


async def put_layers(segment: Segment, cache: Cache, *, first: int = 0, last: int | None = None) -> None:
    """Publish layers `first` to `last` (the end) of a cache."""
    for layer, (k, v) in list(enumerate(cache))[first : None if last is None else last + 1]:
        await segment.put_layer(layer, k, v if v.shape[2] else None)


def put_one_by_one(segment: Segment, cache: Cache) -> Iterator[tuple[int, int]]:
    """Publish as `Segment.put_layer` does, but with a stop after each Object and each status Object.

    Gives the Location that was published last.
    """
    publication = segment.publication
    model = publication.publisher.descriptor
    geometry = publication.publisher.geometry
    for layer, (k, v) in enumerate(cache):
        sections = {
            component: to_blocks(tensor, geometry, Order.TOKENS_HEADS_DIM, component)[0]
            for component, tensor in ((Component.K, k), (Component.V, v))
        }
        digests: dict[Any, list[bytes]] = {name: [] for name in segment.tracks}
        for block in range(segment.blocks):
            for name, track in segment.tracks.items():
                codec = CODECS[name.codec]
                parts = [sections[component][block] for component in (Component.K, Component.V)]
                raw = parts if name.component is Component.KV else parts[name.component is Component.V]
                pieces = seal(
                    name.component,
                    layer,
                    block,
                    token_start(segment.first_block, block, model.block_tokens),
                    model.block_tokens,
                    codec.value,
                    codec.encode(name.component, raw, geometry),
                )
                track.append(layer, block, pieces, priority=128 * layer // model.layers)
                digests[name].append(data_digest(pieces[0]))
                yield layer, block
        for track in segment.tracks.values():
            track.end_group(layer, segment.blocks)
            yield layer, segment.blocks
        segment.next_layer += 1
        for track in segment.tracks.values():
            if segment.complete:
                track.end(Location(model.layers, 0))
                yield model.layers, 0
        publication.layer_done(segment, digests)
        yield layer, segment.blocks


def check_layer(
    layer: Layer, cache: Cache, model: Descriptor = MODEL, *, blocks: tuple[int, int] | None = None
) -> None:
    """Assert that a layer has the bits of `cache`, of its blocks `blocks` (first, number; default: all)."""
    first, number = blocks or (0, len(cache[0][0]) // model.block_tokens)
    tokens = slice(first * model.block_tokens, (first + number) * model.block_tokens)
    k, v = cache[layer.layer]
    assert layer.first_block == first
    assert layer.k.dtype == k.dtype
    assert layer.k.shape == k[tokens].shape
    assert layer.k.tobytes() == k[tokens].tobytes()
    if v.shape[2]:
        assert layer.v is not None
        assert layer.v.shape == v[tokens].shape
        assert layer.v.tobytes() == v[tokens].tobytes()
    else:
        assert layer.v is None


def check_layers(layers: Sequence[Layer], cache: Cache, model: Descriptor = MODEL) -> None:
    """Assert that all layers came, in order, with the bits of `cache`."""
    assert [layer.layer for layer in layers] == list(range(model.layers))
    for layer in layers:
        check_layer(layer, cache, model)


def newest_manifest(publication: Publication) -> Manifest:
    """The last version that was published, as a consumer reads it."""
    return manifests(publication)[-1]


def manifests(publication: Publication) -> list[Manifest]:
    """All versions that were published, from the manifest track itself."""
    track = publication.publisher.tracks.get(FullTrackName(publication.name.namespace, b"manifest"))
    assert track is not None
    assert track.largest is not None
    return [
        Manifest.parse(b"".join(stored.payload)) for stored in track.objects(Location(0, 0), track.largest)
    ]


def stored(publication: Publication, name: str) -> dict[tuple[int, int], StoredObject]:
    """All Objects of a data track, by layer and block."""
    track = publication.segments[DataTrack.parse(name).segment].tracks[DataTrack.parse(name)]
    objects = track.objects(Location(0, 0), Location(1000, 1000))
    return {(item.location.group, item.location.object): item for item in objects}


def payload(item: StoredObject) -> bytes:
    """The payload in one piece."""
    return b"".join(item.payload)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some octets of a stream, as one end sent them."""

    from_client: bool
    stream: int
    data: bytes
    fin: bool


class Wiretap:
    """Sees what goes over a link, and can change it: `change` gets each piece before it is sent and returns
    what is sent instead, or None to break the stream off there, as a reset by its sender would, which leaves
    `reset_after` seconds later; `delay` says for how many seconds a piece is held back, and all that follows
    in its stream; `mute` says which pieces never arrive, though their sender is told so.
    """

    def __init__(self, link: Link) -> None:
        self.pieces: list[Piece] = []
        self.change: Callable[[Piece], Piece | None] | None = None
        self.delay: Callable[[Piece], float] | None = None
        self.mute: Callable[[Piece], bool] | None = None
        self.reset_after = 0.0
        self._link = link
        self._broken: set[tuple[bool, int]] = set()
        self._sent: dict[tuple[bool, int], int] = {}
        self._held: dict[tuple[bool, int], float] = {}
        self._post = link.post_piece
        link.post_piece = self._tapped  # type: ignore[method-assign]  # a tap is a tap

    def _tapped(self, sender: MemoryConnection, stream_id: int, data: bytes, fin: bool) -> None:
        piece: Piece | None = Piece(sender.is_client, stream_id, data, fin)
        assert piece is not None
        key = (piece.from_client, stream_id)
        self.pieces.append(piece)
        if key in self._broken or (self.mute is not None and self.mute(piece)):
            self._swallow(sender, stream_id, data, fin)
            return
        if self.change is not None:
            piece = self.change(piece)
        if piece is None:
            self._broken.add(key)
            reset = sender, sender.peer_end.on_reset, stream_id, 0, self._sent.get(key, 0)
            if self.reset_after:
                asyncio.get_running_loop().call_later(self.reset_after, self._link.post, *reset)
            else:
                self._link.post(*reset)
            self._swallow(sender, stream_id, data, fin)
            return
        self._sent[key] = self._sent.get(key, 0) + len(piece.data)
        loop = asyncio.get_running_loop()
        delay = 0.0 if self.delay is None else self.delay(piece)
        behind = self._held.get(key, 0.0)
        if delay or behind > loop.time():
            self._held[key] = max(loop.time() + delay, behind + 1e-9)  # Timers of one time have no order.
            loop.call_at(self._held[key], self._post, sender, stream_id, piece.data, piece.fin)
        else:
            self._post(sender, stream_id, piece.data, piece.fin)

    def requests(self, *, from_client: bool) -> list[Request]:
        """The requests that one end sent, in order."""
        streams: dict[int, bytearray] = {}
        for piece in self.pieces:
            opened_by_client = not piece.stream & 1
            if piece.from_client is from_client is opened_by_client and not piece.stream & 2:
                streams.setdefault(piece.stream, bytearray()).extend(piece.data)
        requests = []
        for data in streams.values():
            message = MessageDecoder().feed(bytes(data))[0]
            assert isinstance(message, Request)
            requests.append(message)
        return requests

    def streams(self, *, from_client: bool) -> list[list[Event]]:
        """The events of each data stream that one end sent, in the order in which the streams began."""
        streams: dict[int, bytearray] = {}
        for piece in self.pieces:
            if piece.from_client is from_client and piece.stream & 2:
                streams.setdefault(piece.stream, bytearray()).extend(piece.data)
        return [
            list(DataStreamDecoder().feed(bytes(data)))
            for data in streams.values()
            if (kind := read_vi64(data, 0)) is not None and kind[0] != CONTROL_STREAM
        ]

    def data_objects(self, *, from_client: bool) -> Counter[tuple[str, int, int]]:
        """How often each Object of a data track went over the wire: (component, layer, block) by its header.

        Streams that were broken off, or are not at their end, count with the Objects that they hold whole.
        """
        count: Counter[tuple[str, int, int]] = Counter()
        for events in self.streams(from_client=from_client):
            payload = bytearray()
            for event in events:
                if isinstance(event, ObjectHeader):
                    payload.clear()
                elif isinstance(event, PayloadChunk):
                    payload += event.data
                    if event.last and payload[:4] == b"KVO1":
                        component = Component(payload[5]).text
                        layer, block = struct.unpack_from(">II", payload, 8)
                        count[component, layer, block] += 1
        return count

    def _swallow(self, sender: MemoryConnection, stream_id: int, data: bytes, fin: bool) -> None:
        self._link.post(sender.peer_end, sender.on_acknowledged, stream_id, len(data), fin)


class Stage:
    """Two sessions over one link: `there` publishes, `here` subscribes."""

    def __init__(self, link: Link, there: Session, here: Session, tracks: Tracks) -> None:
        self.link = link
        self.there = there
        self.here = here
        self.tracks = tracks

    def publisher(self, model: Descriptor = MODEL, **options: Any) -> Publisher:
        return Publisher(model, SCOPE_KEY, tracks=self.tracks, **options)

    def subscriber(self, model: Descriptor = MODEL, **options: Any) -> Subscriber:
        return Subscriber(self.here, model, SCOPE_KEY, **options)

    async def receive(
        self, tokens: Tokens = TOKENS, *, model: Descriptor = MODEL, **options: Any
    ) -> list[Layer]:
        """Receive all that is wanted; the subscriber's options and those of `receive` together."""
        mine = {name: options.pop(name) for name in ("layers", "blocks", "publications") if name in options}
        async with await self.subscriber(model, **options).receive(tokens, **mine) as reception:
            return await collect(reception)

    def track(self, publication: Publication, name: bytes) -> Track:
        track = self.tracks.get(FullTrackName(publication.name.namespace, name))
        assert track is not None
        return track


async def collect(reception: Reception) -> list[Layer]:
    """All layers."""
    return [layer async for layer in reception]


def now() -> float:
    """The virtual time, in seconds."""
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def stage(
    *,
    publisher_dials: bool = False,
    tracks: Tracks | None = None,
    limits: Limits | None = None,
    subscriber_limits: Limits | None = None,
    tokens: Sequence[Token] = (),
    announce: bool | None = None,
    options: QuicOptions | None = None,
    publisher_options: QuicOptions | None = None,
    tap: Callable[[Link], None] | None = None,
    **link_options: Any,
) -> AsyncIterator[Stage]:
    """A link with a session on each end. `publisher_dials`: the publisher is the client.

    `limits` and `publisher_options` are the publisher's. `tap` gets the link before anything goes over it. At
    the end no task may be left that was not there before.
    """
    before = asyncio.all_tasks()
    tracks = Tracks() if tracks is None else tracks
    options = options or QuicOptions()
    publisher_options = publisher_options or QuicOptions()
    client, server = (publisher_options, options) if publisher_dials else (options, publisher_options)
    link = pair(client=client, server=server, **link_options)
    if tap is not None:
        tap(link)
    ends = (link.client, link.server) if publisher_dials else (link.server, link.client)
    there = Session(ends[0], tracks=tracks, limits=limits, tokens=tokens, announce=announce)
    here = Session(ends[1], limits=subscriber_limits)
    try:
        await asyncio.gather(there.start(), here.start())
        yield Stage(link, there, here, tracks)
    finally:
        await asyncio.gather(there.close(), here.close())
    for _ in range(10):  # Tasks that were just cancelled need a few turns.
        left = asyncio.all_tasks() - before
        if not left:
            break
        await asyncio.sleep(0)
    assert not left, f"tasks left behind: {sorted(map(repr, left))}"
