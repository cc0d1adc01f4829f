"""Puts one segment together at the consumer: checks Objects, places them, and tells which layers are usable
(kvcs 7.4).

Pure: no network and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcs.codecs import CODECS
from kvcs.errors import ManifestRejected
from kvcs.layout import Buffer, Geometry, LayerBuffer, Tensor, split_kv
from kvcs.manifest import DIGEST_SIZE, SegmentEntry
from kvcs.names import Component, DataTrack
from kvcs.payload import Expected, data_digest, open_object

__all__ = ["Layer", "Missing", "SegmentAssembly", "choose_tracks"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One usable layer of a segment: every Object received and verified.

    `k` and `v` are [tokens, kv_heads, head_dim] arrays of the descriptor's dtype, the caller's to keep; v is
    None with attention "mla". They start at absolute block `first_block`.
    """

    segment: int
    layer: int
    first_block: int
    k: Tensor
    v: Tensor | None


@dataclass(frozen=True, slots=True, order=True)
class Missing:
    """A block of a layer that did not come; `block` is its absolute index."""

    segment: int
    layer: int
    block: int


def choose_tracks(entry: SegmentEntry, codecs: Sequence[str], geometry: Geometry) -> tuple[DataTrack, ...]:
    """What to receive of a segment: the "k" and "v" tracks of one codec, or one "kv" track (kvcs 3.2); () if
    nothing is known.

    `codecs` are the wanted codecs, the first preferred; the pair is preferred to a "kv" track of the same
    codec. With attention "mla" there is no V of its own, so only a "kv" track will do (kvsp 2.4).
    """
    offered = set(entry.tracks)
    for codec in codecs:
        pair = tuple(DataTrack(component, codec, entry.segment) for component in (Component.K, Component.V))
        joint = DataTrack(Component.KV, codec, entry.segment)
        if geometry.v_head_dim and offered.issuperset(pair):
            return pair
        if joint in offered:
            return (joint,)
    return ()


@dataclass(slots=True)
class _LayerState:
    """A layer that is not whole: where its Objects go, and the Data Digests of those that are there."""

    buffers: dict[Component, LayerBuffer]
    placed: dict[DataTrack, dict[int, bytes]] = field(default_factory=dict)


class SegmentAssembly:
    """One segment as far as it has come: `layers` of it (first, last), and its first `blocks` blocks.

    Layers leave it in ascending order: `due` is the next one, which is taken, or skipped when it will not
    come. `entry` is the segment's newest description; `update` replaces it.
    """

    def __init__(
        self,
        entry: SegmentEntry,
        geometry: Geometry,
        tracks: tuple[DataTrack, ...],
        layers: tuple[int, int],
        blocks: int,
    ) -> None:
        self.entry = entry
        self.tracks = tracks
        self.first, self.last = layers
        self.blocks = blocks
        self.due = self.first
        self.received = 0
        """Octets of Objects placed."""
        self._geometry = geometry
        self._codecs = {track: CODECS[track.codec] for track in tracks}
        self._layers: dict[int, _LayerState] = {}
        self._taken: dict[int, dict[DataTrack, bytes]] = {}
        """Per layer and track: the Data Digests of what was handed out, concatenated."""
        self._skipped: list[Missing] = []
        self._left = dict.fromkeys(tracks, (self.last - self.first + 1) * blocks)

    @property
    def done(self) -> bool:
        """Whether all layers were taken or skipped."""
        return self.due > self.last

    @property
    def untouched(self) -> bool:
        """Whether no layer was handed out, so that the segment may still come from another publication."""
        return not self._taken

    def needs(self, track: DataTrack) -> bool:
        """Whether any Object of `track` is needed and not here yet."""
        return self._left[track] > 0

    def wants(self, track: DataTrack, layer: int, block: int) -> bool:
        """Whether the Object is needed and not here yet."""
        if not (self.due <= layer <= self.last and 0 <= block < self.blocks):
            return False
        state = self._layers.get(layer)
        return state is None or block not in state.placed.get(track, ())

    def missing_of(self, track: DataTrack, layer: int) -> Sequence[int]:
        """The Object IDs of `track` still needed for `layer`, ascending."""
        if not self.due <= layer <= self.last:
            return ()
        state = self._layers.get(layer)
        placed = state.placed.get(track, {}) if state else {}
        blocks = range(self.blocks)
        return [block for block in blocks if block not in placed] if placed else blocks

    def missing(self) -> list[Missing]:
        """All (layer, block) pairs that were not handed out and of which an Object, in any track, is not
        here.
        """
        return self._skipped + [
            pair for layer in range(self.due, self.last + 1) for pair in self._missing_in(layer)
        ]

    def place(self, track: DataTrack, layer: int, block: int, payload: Buffer) -> bool:
        """Check an Object that is wanted, and copy its Data to its place; True if the layer became usable by
        it.

        Raises ObjectRejected: the Object is then treated as missing (kvcs 4).
        """
        codec = self._codecs[track]
        expected = Expected.at(
            layer,
            block,
            component=track.component,
            codec=codec.value,
            first_block=self.entry.first_block,
            geometry=self._geometry,
            listed_digest=self.entry.listed_digest(track, layer, block),
        )
        section = codec.decode(track.component, open_object(payload, expected), self._geometry)
        state = self._layers.get(layer)
        if state is None:
            state = self._layers[layer] = self._new_state()
        if track.component is Component.KV:
            k_section, v_section = split_kv(section, self._geometry)
            state.buffers[Component.K].place(block, k_section)
            if Component.V in state.buffers:
                state.buffers[Component.V].place(block, v_section)
        else:
            state.buffers[track.component].place(block, section)
        state.placed.setdefault(track, {})[block] = data_digest(payload)
        self._left[track] -= 1
        self.received += len(payload)
        return self.usable(layer)

    def usable(self, layer: int) -> bool:
        """Whether every needed Object of `layer`, in all tracks, is placed, and it was not handed out yet
        (kvcs 7.4).
        """
        state = self._layers.get(layer)
        return state is not None and all(
            len(state.placed.get(track, ())) == self.blocks for track in self.tracks
        )

    def take(self) -> Layer:
        """Hand out the layer that is due. Raises ValueError if it is not usable."""
        if not self.usable(self.due):
            raise ValueError(f"layer {self.due} of segment {self.entry.segment} is not usable yet")
        state = self._layers.pop(self.due)
        self._taken[self.due] = {
            track: b"".join(placed[block] for block in range(self.blocks))
            for track, placed in state.placed.items()
        }
        v = state.buffers.get(Component.V)
        layer = Layer(
            self.entry.segment,
            self.due,
            self.entry.first_block,
            state.buffers[Component.K].array,
            None if v is None else v.array,
        )
        self.due += 1
        return layer

    def skip(self) -> None:
        """Do without the layer that is due. What is missing of it stays missing."""
        self._skipped += self._missing_in(self.due)
        for track in self.tracks:
            self._left[track] -= len(self.missing_of(track, self.due))
        self._layers.pop(self.due, None)
        self.due += 1

    def contradictions(self, entry: SegmentEntry) -> list[tuple[DataTrack, int, int]]:
        """The placed Objects (track, layer, block) for which `entry` lists another digest.

        Raises ManifestRejected when it does so for an Object of a layer that was handed out.
        """
        for layer, taken in self._taken.items():
            for track, digests in taken.items():
                group = entry.object_digests.get(track, ())[layer : layer + 1]
                if group and group[0][: len(digests)] != digests:
                    raise ManifestRejected(
                        f"segments[{entry.segment}].object_digests",
                        f"{track}: layer {layer} came with other digests",
                    )
        return [
            (track, layer, block)
            for layer, state in self._layers.items()
            for track, placed in state.placed.items()
            if layer < len(group := entry.object_digests.get(track, ()))
            for block, digest in placed.items()
            if group[layer][block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE] != digest
        ]

    def update(self, entry: SegmentEntry) -> list[tuple[DataTrack, int, int]]:
        """Take over a newer description, and drop the Objects that it contradicts; returns those.

        Raises ManifestRejected as `contradictions` does.
        """
        dropped = self.contradictions(entry)
        self.entry = entry
        for track, layer, block in dropped:
            del self._layers[layer].placed[track][block]
            self._left[track] += 1
        return dropped

    def _missing_in(self, layer: int) -> list[Missing]:
        blocks = {block for track in self.tracks for block in self.missing_of(track, layer)}
        return [
            Missing(self.entry.segment, layer, self.entry.absolute_block(block)) for block in sorted(blocks)
        ]

    def _new_state(self) -> _LayerState:
        components = (Component.K, Component.V) if self._geometry.v_head_dim else (Component.K,)
        return _LayerState(
            {component: LayerBuffer(self._geometry, component, self.blocks) for component in components}
        )
