"""Puts one segment together at the consumer: checks Objects, places them, and tells which layers are usable
(kvcs 7.4).

Pure: no network and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcs.codecs import CODECS
from kvcs.errors import ManifestRejected
from kvcs.layout import Buffer, Geometry, LayerBuffer, Tensor, split_kv
from kvcs.manifest import SegmentEntry
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


def choose_tracks(entry: SegmentEntry, codecs: tuple[str, ...]) -> tuple[DataTrack, ...]:
    """What to receive of a segment: the "k" and "v" tracks of one codec, or one "kv" track (kvcs 3.2); () if
    nothing is known.

    `codecs` are the wanted codecs, the first preferred; the pair is preferred to a "kv" track of the same
    codec.
    """
    offered = set(entry.tracks)
    for codec in codecs:
        pair = tuple(DataTrack(component, codec, entry.segment) for component in (Component.K, Component.V))
        joint = DataTrack(Component.KV, codec, entry.segment)
        if offered.issuperset(pair):
            return pair
        if joint in offered:
            return (joint,)
    return ()


@dataclass(slots=True)
class _LayerState:
    buffers: dict[Component, LayerBuffer]
    placed: dict[DataTrack, dict[int, bytes]] = field(default_factory=dict)
    """Per track: block -> Data Digest."""


class SegmentAssembly:
    """One segment as far as it has come: `layers` of it (first, last), and its first `blocks` blocks.

    `entry` is its newest description; replace it when a new manifest version comes.
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
        self.received = 0
        """Octets of Objects placed."""
        self._geometry = geometry
        self._codecs = {track: CODECS[track.codec] for track in tracks}
        self._layers: dict[int, _LayerState] = {}
        self._taken: dict[int, dict[DataTrack, dict[int, bytes]]] = {}
        self._left = dict.fromkeys(tracks, (self.last - self.first + 1) * blocks)

    def needs(self, track: DataTrack) -> bool:
        """Whether any Object of `track` is needed and not here yet."""
        return self._left[track] > 0

    def wants(self, track: DataTrack, layer: int, block: int) -> bool:
        """Whether the Object is needed and not here yet."""
        if not (self.first <= layer <= self.last and 0 <= block < self.blocks) or layer in self._taken:
            return False
        state = self._layers.get(layer)
        return state is None or block not in state.placed.get(track, ())

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
        state = self._state(layer)
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

    def update(self, entry: SegmentEntry) -> list[tuple[DataTrack, int, int]]:
        """Take over a newer description, and drop placed Objects whose digest it contradicts; returns those.

        Raises ManifestRejected when it contradicts an Object of a layer that was handed out.
        """
        self.entry = entry
        for layer, tracks in self._taken.items():
            for track, placed in tracks.items():
                if any(self._contradicts(track, layer, block, digest) for block, digest in placed.items()):
                    raise ManifestRejected(
                        f"segments[{entry.segment}].object_digests",
                        f"{track}: layer {layer} came with another digest",
                    )
        dropped = [
            (track, layer, block)
            for layer, state in self._layers.items()
            for track, placed in state.placed.items()
            for block, digest in placed.items()
            if self._contradicts(track, layer, block, digest)
        ]
        for track, layer, block in dropped:
            del self._layers[layer].placed[track][block]
            self._left[track] += 1
        return dropped

    def _contradicts(self, track: DataTrack, layer: int, block: int, digest: bytes) -> bool:
        listed = self.entry.listed_digest(track, layer, block)
        return listed is not None and listed != digest

    def usable(self, layer: int) -> bool:
        """Whether every needed Object of `layer`, in all tracks, is placed (kvcs 7.4)."""
        state = self._layers.get(layer)
        return state is not None and all(
            len(state.placed.get(track, ())) == self.blocks for track in self.tracks
        )

    def take(self, layer: int) -> Layer:
        """Hand out a usable layer, once. Raises ValueError if it is not usable."""
        if not self.usable(layer):
            raise ValueError(f"layer {layer} of segment {self.entry.segment} is not usable yet")
        state = self._layers.pop(layer)
        buffers = state.buffers
        self._taken[layer] = state.placed
        v = buffers.get(Component.V)
        return Layer(
            self.entry.segment,
            layer,
            self.entry.first_block,
            buffers[Component.K].array,
            None if v is None else v.array,
        )

    @property
    def done(self) -> bool:
        """Whether all wanted layers have been handed out."""
        return len(self._taken) == self.last - self.first + 1

    @property
    def untouched(self) -> bool:
        """Whether no layer has been handed out yet, so that the segment may still come from another
        publication.
        """
        return not self._taken

    def missing_of(self, track: DataTrack, layer: int) -> list[int]:
        """The Object IDs of `track` still needed for `layer`."""
        return [block for block in range(self.blocks) if self.wants(track, layer, block)]

    def missing(self) -> list[Missing]:
        """All (layer, block) pairs of which an Object, in any track, is not here."""
        pairs = {
            (layer, block)
            for layer in range(self.first, self.last + 1)
            for track in self.tracks
            for block in self.missing_of(track, layer)
        }
        return [
            Missing(self.entry.segment, layer, self.entry.absolute_block(block))
            for layer, block in sorted(pairs)
        ]

    def _state(self, layer: int) -> _LayerState:
        state = self._layers.get(layer)
        if state is None:
            components = (Component.K, Component.V) if self._geometry.v_head_dim else (Component.K,)
            state = self._layers[layer] = _LayerState(
                {component: LayerBuffer(self._geometry, component, self.blocks) for component in components}
            )
        return state
