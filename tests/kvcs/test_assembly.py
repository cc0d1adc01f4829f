"""Putting a segment together: what is wanted, missing, usable and handed out (kvcs 7.4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.assembly import Layer, Missing, SegmentAssembly, choose_tracks
from kvcs.errors import ManifestRejected, ObjectRejected
from kvcs.identity import block_keys
from kvcs.layout import Geometry
from kvcs.manifest import Manifest, SegmentEntry
from kvcs.names import DataTrack
from kvcs.payload import RAW, data_digest, seal, token_start
from tests.kvcs.stage import CACHE, MODEL, SCOPE_KEY, TOKENS, descriptor

GEOMETRY = Geometry.of(MODEL)
K, V, KV = (DataTrack.parse(f"{component}.raw.s0") for component in ("k", "v", "kv"))
ENTRY = Manifest(MODEL).with_segment(block_keys(SCOPE_KEY, MODEL, TOKENS), [K, V]).segments[0]
LAYERS, BLOCKS = 4, 3
PAIRS = [(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]


def payload(track: DataTrack, layer: int, block: int, *, other: bool = False) -> bytes:
    """An Object of CACHE; or `other` Data, under a digest that fits."""
    k, v = (tensor[2 * block : 2 * block + 2].tobytes() for tensor in CACHE[layer])
    data = {K: k, V: v, KV: k + v}[track]
    if other:
        data = data[::-1]
    return b"".join(seal(track.component, layer, block, token_start(0, block, 2), 2, RAW, data))


def entry_with(
    *listed: tuple[DataTrack, int], wrong: tuple[DataTrack, int, int] | None = None
) -> SegmentEntry:
    """ENTRY with the digests of so many layers of a track, one of them not what is published."""
    return replace(
        ENTRY,
        object_digests={
            track: tuple(
                b"".join(
                    b"?" * 32 if (track, layer, block) == wrong else data_digest(payload(track, layer, block))
                    for block in range(BLOCKS)
                )
                for layer in range(layers)
            )
            for track, layers in listed
        },
    )


def assembly(
    layers: tuple[int, int] = (0, LAYERS - 1), blocks: int = BLOCKS, tracks: tuple[DataTrack, ...] = (K, V)
) -> SegmentAssembly:
    return SegmentAssembly(ENTRY, GEOMETRY, tracks, layers, blocks)


def check(layer: Layer, number: int, blocks: int = BLOCKS) -> None:
    k, v = (tensor[: 2 * blocks] for tensor in CACHE[number])
    assert (layer.segment, layer.layer, layer.first_block) == (0, number, 0)
    assert layer.v is not None
    assert (layer.k.tobytes(), layer.v.tobytes()) == (k.tobytes(), v.tobytes())


@given(
    st.permutations([(track, *pair) for track in (K, V) for pair in PAIRS]),
    st.integers(0, LAYERS - 1),
    st.integers(0, LAYERS - 1),
    st.integers(1, BLOCKS),
    st.integers(0, 24),
)
def test_any_order_of_objects(
    objects: list[tuple[DataTrack, int, int]], one: int, two: int, blocks: int, until: int
) -> None:
    """Each Object is wanted once; a layer is usable with the last of its Objects; all is counted exactly."""
    first, last = sorted((one, two))
    puzzle = assembly((first, last), blocks)
    needed = {item for item in objects if first <= item[1] <= last and item[2] < blocks}
    placed: set[tuple[DataTrack, int, int]] = set()
    taken: list[int] = []
    for item in [*objects[:until], *objects[:until]]:  # everything twice
        track, layer, block = item
        assert puzzle.wants(*item) == (item in needed - placed and layer not in taken)
        if not puzzle.wants(*item):
            continue
        placed.add(item)
        whole = {other for other in needed if other[1] == layer} <= placed
        assert puzzle.place(track, layer, block, payload(*item)) == whole == puzzle.usable(layer)
        while not puzzle.done and puzzle.usable(puzzle.due):
            taken.append(puzzle.due)
            check(puzzle.take(), taken[-1], blocks)
        left = needed - placed
        assert [puzzle.needs(track) for track in (K, V)] == [
            any(other[0] is track for other in left) for track in (K, V)
        ]
        assert puzzle.missing() == [Missing(0, *pair) for pair in sorted({other[1:] for other in left})]
        assert puzzle.received == len(placed) * 84
    assert taken == list(range(first, first + len(taken)))
    assert puzzle.done == (len(taken) == last - first + 1)
    assert puzzle.untouched == (not taken)
    for track in (K, V):
        for layer in range(-1, LAYERS + 1):
            assert list(puzzle.missing_of(track, layer)) == [
                block for block in range(BLOCKS) if (track, layer, block) in needed - placed
            ]


def test_a_layer_that_is_skipped() -> None:
    """It is wanted no more; what was missing of it stays missing; the tracks need only the rest."""
    puzzle = assembly()
    for track, pairs in ((K, PAIRS), (V, [pair for pair in PAIRS if pair != (0, 1)])):
        for pair in pairs:
            puzzle.place(track, *pair, payload(track, *pair))
    assert (puzzle.due, puzzle.usable(0), puzzle.needs(K), puzzle.needs(V)) == (0, False, False, True)
    with pytest.raises(ValueError, match="layer 0 of segment 0 is not usable yet"):
        puzzle.take()
    puzzle.skip()
    assert (puzzle.due, puzzle.needs(V), puzzle.untouched) == (1, False, True)
    assert not puzzle.wants(V, 0, 1)
    for number in (1, 2, 3):
        check(puzzle.take(), number)
    assert puzzle.done
    assert puzzle.missing() == [Missing(0, 0, 1)]


def test_absolute_blocks_of_a_later_segment() -> None:
    later = replace(ENTRY, segment=2, first_block=40)
    puzzle = SegmentAssembly(later, GEOMETRY, (K, V), (1, 1), 2)
    assert puzzle.missing() == [Missing(2, 1, 40), Missing(2, 1, 41)]
    with pytest.raises(ObjectRejected, match="Token Start: expected 80, got 0"):
        puzzle.place(K, 1, 0, payload(K, 1, 0))
    assert puzzle.wants(K, 1, 0)


def test_a_kv_track() -> None:
    puzzle = assembly(tracks=(KV,))
    for pair in PAIRS:
        puzzle.place(KV, *pair, payload(KV, *pair))
    for number in range(LAYERS):
        check(puzzle.take(), number)


def test_what_was_handed_out_is_the_callers() -> None:
    puzzle = assembly()
    for track in (K, V):
        for pair in PAIRS:
            puzzle.place(track, *pair, payload(track, *pair))
    layers = [puzzle.take() for _ in range(LAYERS)]
    for layer in layers:
        layer.k[...] = 0
    assert not np.shares_memory(layers[0].k, layers[1].k)
    assert puzzle.contradictions(entry_with((K, 4), (V, 4))) == []


def test_a_bad_object_leaves_its_place_free() -> None:
    puzzle = assembly()
    bad = bytearray(payload(K, 0, 0))
    bad[-1] ^= 1
    with pytest.raises(ObjectRejected):
        puzzle.place(K, 0, 0, bad)
    assert puzzle.wants(K, 0, 0)
    assert puzzle.received == 0
    puzzle.place(K, 0, 0, payload(K, 0, 0))
    assert not puzzle.wants(K, 0, 0)


def test_digests_that_are_listed_before() -> None:
    puzzle = assembly()
    assert puzzle.update(entry_with((K, 1))) == []
    with pytest.raises(ObjectRejected, match="Data Digest listed in the manifest"):
        puzzle.place(K, 0, 0, payload(K, 0, 0, other=True))
    puzzle.place(V, 0, 0, payload(V, 0, 0, other=True))  # none is listed
    puzzle.place(K, 1, 0, payload(K, 1, 0, other=True))


def test_digests_that_are_listed_later() -> None:
    """They drop what differs, and what is dropped is wanted again."""
    puzzle = assembly()
    for track in (K, V):
        for pair in PAIRS:
            puzzle.place(track, *pair, payload(track, *pair, other=pair in [(1, 2), (3, 0)]))
    check(puzzle.take(), 0)
    newer = entry_with((K, 2), (V, 1))
    assert puzzle.contradictions(newer) == [(K, 1, 2)]
    assert puzzle.usable(1)  # Looking changes nothing.
    assert puzzle.update(newer) == [(K, 1, 2)]
    assert (puzzle.usable(1), puzzle.usable(3)) == (False, True)
    assert puzzle.wants(K, 1, 2)
    assert not puzzle.wants(V, 1, 2)
    assert puzzle.needs(K)
    assert not puzzle.needs(V)
    assert puzzle.missing() == [Missing(0, 1, 2)]
    assert puzzle.place(K, 1, 2, payload(K, 1, 2))
    assert set(puzzle.update(entry_with((K, 4), (V, 4)))) == {(V, 1, 2), (K, 3, 0), (V, 3, 0)}


@pytest.mark.parametrize("wrong", [(K, 0, 0), (V, 0, 2)])
@pytest.mark.parametrize("blocks", [2, 3])
def test_digests_that_contradict_a_layer_that_was_handed_out(
    wrong: tuple[DataTrack, int, int], blocks: int
) -> None:
    """Of the blocks that were received, that is."""
    puzzle = assembly(blocks=blocks)
    for track in (K, V):
        for block in range(blocks):
            puzzle.place(track, 0, block, payload(track, 0, block))
    puzzle.take()
    newer = entry_with((K, 1), (V, 1), wrong=wrong)
    if wrong[2] < blocks:
        with pytest.raises(ManifestRejected, match=f"{wrong[0]}: layer 0 came with other digests"):
            puzzle.update(newer)
        assert puzzle.entry is ENTRY
    else:
        assert puzzle.update(newer) == []
        assert puzzle.entry is newer


def entry_of(*names: str) -> SegmentEntry:
    return replace(ENTRY, tracks=tuple(map(DataTrack.parse, names)))


@pytest.mark.requirement("R3.2b")
@pytest.mark.parametrize(
    ("offered", "codecs", "chosen"),
    [
        (["k.raw.s0", "v.raw.s0"], ["raw"], ["k.raw.s0", "v.raw.s0"]),
        (["v.raw.s0", "k.raw.s0", "kv.raw.s0"], ["raw"], ["k.raw.s0", "v.raw.s0"]),
        (["k.raw.s0", "kv.raw.s0"], ["raw"], ["kv.raw.s0"]),
        (["k.raw.s0"], ["raw"], []),
        (["k.raw.s0", "v.x-shuffle-zlib.s0"], ["raw", "x-shuffle-zlib"], []),
        (["k.raw.s0", "v.raw.s0"], ["x-shuffle-zlib"], []),
        (
            ["k.raw.s0", "v.raw.s0", "kv.x-shuffle-zlib.s0"],
            ["x-shuffle-zlib", "raw"],
            ["kv.x-shuffle-zlib.s0"],
        ),
        (["k.x-zstd.s0", "v.x-zstd.s0", "kv.raw.s0"], ["raw"], ["kv.raw.s0"]),
    ],
)
def test_choice_of_tracks(offered: list[str], codecs: list[str], chosen: list[str]) -> None:
    """The k and v pair of one codec, or one kv track; the preferred codec first."""
    assert [str(track) for track in choose_tracks(entry_of(*offered), codecs, GEOMETRY)] == chosen


def test_choice_of_tracks_with_mla() -> None:
    geometry = Geometry.of(descriptor(attention="mla", kv_heads=1))
    entry = entry_of("k.raw.s0", "v.raw.s0", "kv.x-shuffle-zlib.s0")
    assert choose_tracks(entry, ["raw"], geometry) == ()
    chosen = choose_tracks(entry, ["raw", "x-shuffle-zlib"], geometry)
    assert [str(track) for track in chosen] == ["kv.x-shuffle-zlib.s0"]
