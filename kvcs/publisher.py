"""Publish KV caches: a Publisher makes Publications, a Publication has Segments, and a Segment takes layers
(kvcs 5, 6).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from kvcs.codecs import CODECS, Codec
from kvcs.errors import InvalidValue
from kvcs.identity import Descriptor, ScopeKey, Tokens, block_keys, token_array
from kvcs.layout import Geometry, Order, Tensor, object_size_advice, to_blocks
from kvcs.manifest import MAX_SEGMENTS, Manifest
from kvcs.names import MANIFEST, Component, DataTrack, PublicationName
from kvcs.payload import Data, data_digest, seal, token_start
from moqt.errors import DoneCode
from moqt.filters import Location
from moqt.names import FullTrackName
from moqt.track import Track
from moqt.tracks import Tracks
from moqt.wire import PropertyType

__all__ = ["MANIFEST_INTERVAL", "Publication", "Publisher", "Segment"]

logger = logging.getLogger(__name__)

MANIFEST_INTERVAL: Final = 8
"""Completed layers after which a new manifest version appears at the latest (kvcs 5)."""

MAX_LISTED: Final = 200_000
"""Objects whose digests a manifest lists: 13 MiB of JSON, so that it stays below what consumers take
(security 4.4). The Groups after that are published without being listed.
"""

Sealed: TypeAlias = dict[DataTrack, list[tuple[bytes, *tuple[memoryview, ...]]]]
"""The Objects of one layer: for each track, header and Data of every block."""


class Publisher:
    """Makes the publications of one model in one scope, and offers them in `tracks`, which sessions serve.

    `codecs` are the codecs of the "k" and "v" tracks, `joint_codecs` those of "kv" tracks; each is a complete
    offer of its own (kvcs 3.2). `retention` is how long relays may keep Objects, in seconds (None: not said).
    Raises InvalidValue.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        scope_key: ScopeKey,
        *,
        tracks: Tracks | None = None,
        codecs: Sequence[str] = ("raw",),
        joint_codecs: Sequence[str] = (),
        retention: float | None = None,
    ) -> None:
        unknown = sorted({*codecs, *joint_codecs} - set(CODECS))
        if unknown:
            raise InvalidValue(f"no codec {', '.join(unknown)} here; there are {', '.join(CODECS)}")
        if codecs and not Geometry.of(descriptor).v_head_dim:
            raise InvalidValue(
                'with attention "mla" there is no V of its own: offer joint codecs only (kvsp 2.4)'
            )
        if not codecs and not joint_codecs:
            raise InvalidValue("a publication needs at least one codec")
        if len(set(codecs)) != len(codecs) or len(set(joint_codecs)) != len(joint_codecs):
            raise InvalidValue("a codec is named twice")
        if retention is not None and not 0 <= retention < 2**53:
            raise InvalidValue(f"retention is a number of seconds, 0 or more, not {retention}")
        self.descriptor = descriptor
        self.scope_key = scope_key
        self.tracks = Tracks() if tracks is None else tracks
        self.geometry = Geometry.of(descriptor)
        self.retention = retention
        self.encodings = tuple(
            [(component, codec) for codec in codecs for component in (Component.K, Component.V)]
            + [(Component.KV, codec) for codec in joint_codecs]
        )
        advice = object_size_advice(self.geometry)
        if advice:
            logger.warning("%s", advice)  # kvcs 9

    def publish(self, tokens: Tokens, *, deterministic: bool = False) -> Publication:
        """Start a publication of the cache of `tokens`, under a new Publication ID (kvcs 3.1), and announce
        it.

        Its segment 0 covers the complete blocks of `tokens`; there must be one at least. `deterministic` is a
        guarantee that any publication of the same content has bit-identical Objects (kvcs 5). Raises
        InvalidTokens, InvalidValue.
        """
        return Publication(self, tokens, deterministic)


class Publication:
    """One production of the cache of a prefix. Objects published in it never change; what is wrong is closed
    and made anew.
    """

    def __init__(self, publisher: Publisher, tokens: Tokens, deterministic: bool) -> None:
        self.publisher = publisher
        self.segments: list[Segment] = []
        self.closed = False
        self.manifest = Manifest(publisher.descriptor, deterministic=deterministic)
        self._tokens = token_array(tokens)
        self._versions = 0
        self._unpublished_layers = 0
        self._listed = 0
        self._too_many = False
        keys = block_keys(publisher.scope_key, publisher.descriptor, self._tokens)
        if not keys:
            raise InvalidValue(
                f"{len(self._tokens)} tokens fill no block of {publisher.descriptor.block_tokens}: "
                "there is nothing to publish"
            )
        self.name = PublicationName.new(
            publisher.scope_key.scope_id, publisher.descriptor.compat_id, keys[-1]
        )
        self._manifest_track = self.new_track(MANIFEST, priority=0)
        self._add_segment(keys)
        publisher.tracks.announce(self.name.namespace)

    @property
    def segment(self) -> Segment:
        """The newest segment."""
        return self.segments[-1]

    def add_segment(self, tokens: Tokens) -> Segment:
        """Append tokens: the complete blocks that they fill, with the tokens that filled none before, are a
        new segment.

        Each pass of a chunked prefill is one (kvcs 3.3). Raises InvalidTokens, and InvalidValue if they fill
        no block.
        """
        self._check_open()
        if len(self.segments) == MAX_SEGMENTS:
            raise InvalidValue(f"a publication has {MAX_SEGMENTS} segments at most: append more at once")
        grown = np.concatenate((self._tokens, token_array(tokens)))
        keys = block_keys(self.publisher.scope_key, self.publisher.descriptor, grown)
        new = keys[self.manifest.blocks :]
        if not new:
            raise InvalidValue(
                f"the {len(grown)} tokens so far fill no further block "
                f"of {self.publisher.descriptor.block_tokens}: append more at once"
            )
        self._tokens = grown
        return self._add_segment(new)

    def close(self, code: DoneCode | None = None) -> None:
        """Offer the publication no longer. Idempotent.

        Subscriptions end with PUBLISH_DONE: TRACK_ENDED where the segment is complete, else GOING_AWAY, or
        `code` (kvcs 14 #10).
        """
        if self.closed:
            return
        self.closed = True
        tracks = self.publisher.tracks
        for segment in self.segments:
            own = DoneCode.TRACK_ENDED if segment.complete else DoneCode.GOING_AWAY
            for track in segment.tracks.values():
                tracks.remove(track.name, own if code is None else code)
        whole = all(segment.complete for segment in self.segments)
        own = DoneCode.TRACK_ENDED if whole else DoneCode.GOING_AWAY
        tracks.remove(self._manifest_track.name, own if code is None else code)
        tracks.withdraw(self.name.namespace)

    def new_track(self, name: bytes, *, priority: int) -> Track:
        """Offer a Track of this publication. None of its properties is a delivery timeout (kvcs 6)."""
        retention = self.publisher.retention
        properties = () if retention is None else ((PropertyType.MAX_CACHE_DURATION, int(retention * 1000)),)
        track = Track(
            FullTrackName(self.name.namespace, name),
            properties=properties,
            priority=priority,
            one_subgroup=True,
        )
        self.publisher.tracks.add(track)
        return track

    def layer_done(self, segment: Segment, digests: dict[DataTrack, list[bytes]]) -> None:
        """Note a layer that was published; the manifest follows at least every eight layers (kvcs 5)."""
        self._list(digests)
        self._unpublished_layers += 1
        if segment.complete:
            self.manifest = self.manifest.with_complete(segment.number)
        if segment.complete or self._unpublished_layers >= MANIFEST_INTERVAL:
            self._publish_manifest()

    def _list(self, digests: dict[DataTrack, list[bytes]]) -> None:
        """List the Objects of a layer in the manifest, if there is room, also for all others so far: a list
        has no gaps, and what was listed stays.
        """
        self._listed += sum(map(len, digests.values()))
        if self._listed <= MAX_LISTED:
            for track, listed in digests.items():
                self.manifest = self.manifest.with_group(track, listed)
        elif not self._too_many:
            self._too_many = True
            logger.warning(
                "publication %s: a manifest lists %d Objects at most; the digests of further layers "
                "are left out",
                self.name.publication_id.hex(),
                MAX_LISTED,
            )

    def _add_segment(self, keys: Sequence[bytes]) -> Segment:
        number = len(self.segments)
        names = [DataTrack(component, codec, number) for component, codec in self.publisher.encodings]
        self.manifest = self.manifest.with_segment(keys, names)
        first = self.manifest.segments[number].first_block
        size = self.publisher.descriptor.block_tokens
        # kvcs 6: the manifest comes before the first Object, so before the tracks can have any.
        self._publish_manifest()
        segment = Segment(self, number, first, len(keys), len(self._tokens) - first * size)
        self.segments.append(segment)
        return segment

    def _publish_manifest(self) -> None:
        """Object 0 of the next Group (kvcs 5)."""
        self._manifest_track.append(self._versions, 0, self.manifest.to_pieces())
        self._manifest_track.end_group(self._versions, 1)
        self._versions += 1
        self._unpublished_layers = 0

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidValue("this publication was closed; a new production needs a new publication")


class Segment:
    """A range of complete blocks, `blocks` of them from absolute block `first_block` on, whose layers come in
    order.

    It takes arrays of `tokens` tokens: those from `first_block` on. The last `tail` of them fill no block and
    are not published (kvcs 14 #12): consumers compute them, and the arrays may lack them.
    """

    def __init__(
        self, publication: Publication, number: int, first_block: int, blocks: int, tokens: int
    ) -> None:
        publisher = publication.publisher
        self.publication = publication
        self.number = number
        self.first_block = first_block
        self.blocks = blocks
        self.tokens = tokens
        self.tail = tokens - blocks * publisher.descriptor.block_tokens
        self.next_layer = 0
        self.tracks: dict[DataTrack, Track] = {}
        self._putting = asyncio.Lock()
        for component, codec in publisher.encodings:
            name = DataTrack(component, codec, number)
            self.tracks[name] = publication.new_track(name.name, priority=128)

    @property
    def complete(self) -> bool:
        """Whether all layers are published."""
        return self.next_layer == self.publication.publisher.descriptor.layers

    async def put_layer(
        self, layer: int, k: Tensor, v: Tensor | None, *, order: Order = Order.TOKENS_HEADS_DIM
    ) -> None:
        """Publish one layer as soon as it is computed: layers 0, 1, ... in turn (kvcs 3.3).

        `k` and `v` are arrays of `tokens` tokens (or without the `tail`) in `order`, in the descriptor's
        dtype; v is None with attention "mla". They are not copied where they are contiguous in the order of
        sections, and must not change afterwards. Returns when the Objects are queued. Raises InvalidTensor,
        and InvalidValue for a layer out of turn.
        """
        async with self._putting:
            self.publication._check_open()
            layers = self.publication.publisher.descriptor.layers
            if layer != self.next_layer or self.complete:
                due = (
                    f"layer {self.next_layer} is due"
                    if not self.complete
                    else f"all {layers} layers are published"
                )
                raise InvalidValue(f"segment {self.number}: layer {layer} can't be published now: {due}")
            sections = self._cut(k, v, order)
            # Hashing and encoding leave the event loop free to send what was published before.
            sealed = await asyncio.to_thread(self._seal, layer, sections)
            self.publication._check_open()
            self._publish(layer, sealed)

    def _cut(self, k: Tensor, v: Tensor | None, order: Order) -> dict[Component, list[memoryview]]:
        geometry = self.publication.publisher.geometry
        sections = {}
        for component, array in ((Component.K, k), (Component.V, v)):
            if array is None:
                if geometry.v_head_dim:
                    raise InvalidValue('v may be None only with attention "mla"')
                continue
            blocks, tail = to_blocks(array, geometry, order, component)
            if len(blocks) != self.blocks or tail not in (0, self.tail):
                size = geometry.block_tokens
                without = f", or {self.blocks * size} without the tail" if self.tail else ""
                raise InvalidValue(
                    f"segment {self.number} takes arrays of {self.tokens} tokens{without}, "
                    f"{component.text} has {len(blocks) * size + tail}"
                )
            sections[component] = blocks
        return sections

    def _seal(self, layer: int, sections: dict[Component, list[memoryview]]) -> Sealed:
        size = self.publication.publisher.geometry.block_tokens
        sealed: Sealed = {}
        for name in self.tracks:
            codec = CODECS[name.codec]
            sealed[name] = [
                seal(
                    name.component,
                    layer,
                    block,
                    token_start(self.first_block, block, size),
                    size,
                    codec.value,
                    self._encode(codec, name.component, sections, block),
                )
                for block in range(self.blocks)
            ]
        return sealed

    def _encode(
        self, codec: Codec, component: Component, sections: dict[Component, list[memoryview]], block: int
    ) -> Data:
        parts = [sections[part][block] for part in (Component.K, Component.V) if part in sections]
        raw = parts if component is Component.KV else parts[component is Component.V]
        return codec.encode(component, raw, self.publication.publisher.geometry)

    def _publish(self, layer: int, sealed: Sealed) -> None:
        layers = self.publication.publisher.descriptor.layers
        priority = 128 * layer // layers  # kvcs 3.4
        for block in range(self.blocks):
            # kvcs 3.3: ascending Object IDs; the tracks of a block side by side, as a consumer needs them
            # together.
            for name, objects in sealed.items():
                self.tracks[name].append(layer, block, objects[block], priority=priority)
        self.next_layer += 1
        for track in self.tracks.values():
            track.end_group(layer, self.blocks)
            if self.complete:
                track.end(Location(layers, 0))
        self.publication.layer_done(
            self, {name: [data_digest(pieces[0]) for pieces in sealed[name]] for name in sealed}
        )
