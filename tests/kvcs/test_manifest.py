"""The manifest: JSON, hardening, versions, and what a consumer checks."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import InvalidName, InvalidValue, ManifestRejected, PeerFault
from kvcs.identity import Descriptor, ScopeKey, block_keys
from kvcs.manifest import (
    MAX_MANIFEST_SIZE,
    Manifest,
    check,
    check_successor,
    confirmed_segments,
)
from kvcs.names import DataTrack, PublicationName

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/kvsp-lp1.json").read_text())
DESCRIPTOR = Descriptor.parse(VECTORS["descriptor"])
SCOPE = ScopeKey(bytes.fromhex(VECTORS["scope_key"]))
KEYS = block_keys(SCOPE, DESCRIPTOR, range(1, 41))
NAME = PublicationName.new(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS[2])


def tracks(segment: int) -> list[DataTrack]:
    return [DataTrack.parse(f"{component}.raw.s{segment}") for component in "kv"]


def digests(*names: Any) -> list[bytes]:
    return [hashlib.sha256(repr(name).encode()).digest() for name in names]


# Segment 0: blocks 0-2, complete, all digests. Segment 1: blocks 3-4, one Group of "k" listed.
FULL = Manifest(DESCRIPTOR).with_segment(KEYS[:3], tracks(0)).with_segment(KEYS[3:5], tracks(1))
for _track in tracks(0):
    for _layer in range(2):
        FULL = FULL.with_group(_track, digests(*((_track, _layer, block) for block in range(3))))
FULL = FULL.with_group(tracks(1)[0], digests("a", "b")).with_complete(0)


def document(**changes: Any) -> dict[str, Any]:
    """The JSON of FULL with other members; `...` takes one away."""
    members = json.loads(FULL.to_json())
    members.update(changes)
    return {name: value for name, value in members.items() if value is not ...}


def with_entry(index: int = 1, **changes: Any) -> dict[str, Any]:
    members = document()
    members["segments"][index].update(changes)
    entry = {name: value for name, value in members["segments"][index].items() if value is not ...}
    members["segments"][index] = entry
    return members


def parse(members: Any) -> Manifest:
    return Manifest.parse(json.dumps(members).encode())


def test_json_is_that_of_the_text() -> None:
    members = json.loads(FULL.to_json())
    assert list(members) == ["kvcs", "compat", "layers", "block_tokens", "deterministic", "segments"]
    assert members["kvcs"] == 1
    assert members["compat"] == VECTORS["descriptor"]
    assert (members["layers"], members["block_tokens"], members["deterministic"]) == (2, 4, False)
    first, second = members["segments"]
    assert first["block_keys_sha256"] == hashlib.sha256(b"".join(KEYS[:3])).hexdigest()
    assert first["object_digests"]["v.raw.s0"][1][2] == digests((tracks(0)[1], 1, 2))[0].hex()
    del second["object_digests"]
    assert second == {
        "segment": 1,
        "first_block": 3,
        "blocks": 2,
        "block_keys_sha256": hashlib.sha256(b"".join(KEYS[3:5])).hexdigest(),
        "tracks": ["k.raw.s1", "v.raw.s1"],
        "complete": False,
    }
    assert Manifest.parse(FULL.to_json()) == FULL
    assert Manifest.parse(memoryview(FULL.to_json())).to_json() == FULL.to_json()


def test_test_vector_of_block_keys_sha256() -> None:
    keys = [bytes.fromhex(key) for key in VECTORS["block_keys"]]
    entry = Manifest(DESCRIPTOR).with_segment(keys, tracks(0)).segments[0]
    assert entry.block_keys_sha256.hex() == VECTORS["block_keys_sha256"]


@pytest.mark.requirement("R3.4a")
def test_entry_knows_blocks_and_digests() -> None:
    first, second = FULL.segments
    assert (second.absolute_block(0), second.absolute_block(1)) == (3, 4)
    k, v = tracks(0)
    assert first.listed_digest(v, 1, 2) == digests((v, 1, 2))[0]
    assert second.listed_digest(tracks(1)[0], 0, 1) == digests("b")[0]
    assert second.listed_digest(tracks(1)[0], 1, 0) is None  # not yet
    assert second.listed_digest(tracks(1)[1], 0, 0) is None
    for layer, block in ((-1, 0), (0, -1), (0, 3), (2, 0)):
        assert first.listed_digest(k, layer, block) is None


# kvcs 5: deterministic


@pytest.mark.requirement("R5h")
def test_deterministic_is_false_unless_stated() -> None:
    assert Manifest(DESCRIPTOR).deterministic is False
    assert json.loads(Manifest(DESCRIPTOR).to_json())["deterministic"] is False
    stated = Manifest(DESCRIPTOR, deterministic=True).with_segment(KEYS[:3], tracks(0))
    assert stated.deterministic
    assert Manifest.parse(stated.with_complete(0).to_json()).deterministic is True
    for value in (1, "true", None, ...):
        with pytest.raises(ManifestRejected, match="deterministic"):
            parse(document(deterministic=value))


# Parsing


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ([], ""),
        (None, ""),
        ("manifest", ""),
        (document(kvcs=2), "kvcs"),
        (document(kvcs=True), "kvcs"),
        (document(kvcs="1"), "kvcs"),
        (document(kvcs=...), ""),
        (document(compat=...), ""),
        (document(compat=[]), "compat"),
        (document(compat={}), "compat"),
        (document(compat={**VECTORS["descriptor"], "layers": 3.0}), ""),
        (document(layers=3), "layers"),
        (document(layers="2"), "layers"),
        (document(layers=...), ""),
        (document(block_tokens=16), "block_tokens"),
        (document(segments={}), "segments"),
        (document(segments=[{}] * 4097), "segments"),
        (document(segments=[7]), "segments[0]"),
        (document(segments=[{}]), "segments[0]"),
        (document(segments=document()["segments"][1:]), "segments[0].segment"),
        (with_entry(segment=0), "segments[1].segment"),
        (with_entry(segment=True), "segments[1].segment"),
        (with_entry(segment=...), "segments[1]"),
        (with_entry(first_block=4), "segments[1].first_block"),
        (with_entry(first_block=-3), "segments[1].first_block"),
        (with_entry(0, first_block=False), "segments[0].first_block"),
        (with_entry(0, blocks=2), "segments[0].object_digests.k.raw.s0[0]"),
        (with_entry(blocks=0), "segments[1].blocks"),
        (with_entry(blocks=True), "segments[1].blocks"),
        (with_entry(blocks=2**32 + 1), "segments[1].blocks"),
        (with_entry(block_keys_sha256="A" * 64), "segments[1].block_keys_sha256"),
        (with_entry(block_keys_sha256="a" * 63), "segments[1].block_keys_sha256"),
        (with_entry(block_keys_sha256=None), "segments[1].block_keys_sha256"),
        (with_entry(complete=0), "segments[1].complete"),
        (with_entry(tracks="k.raw.s1"), "segments[1].tracks"),
        (with_entry(tracks=[]), "segments[1].tracks"),
        (with_entry(tracks=[f"k.c{number}.s1" for number in range(65)]), "segments[1].tracks"),
        (with_entry(tracks=["k.raw.s1", "k.raw.s1"]), "segments[1].tracks"),
        (with_entry(tracks=["k.raw.s0"]), "segments[1].tracks"),
        (with_entry(tracks=["k.raw.s01"]), "segments[1].tracks"),
        (with_entry(tracks=["manifest"]), "segments[1].tracks"),
        (with_entry(tracks=[1]), "segments[1].tracks"),
        (with_entry(object_digests=[]), "segments[1].object_digests"),
        (with_entry(object_digests={"k.raw.s0": []}), "segments[1].object_digests"),
        (with_entry(object_digests={"k.raw.s1": {}}), "segments[1].object_digests.k.raw.s1"),
        (
            with_entry(object_digests={"k.raw.s1": [["a" * 64] * 2] * 3}),
            "segments[1].object_digests.k.raw.s1",
        ),
        (with_entry(object_digests={"k.raw.s1": [["a" * 64]]}), "segments[1].object_digests.k.raw.s1[0]"),
        (
            with_entry(object_digests={"k.raw.s1": [["a" * 64, "A" * 64]]}),
            "segments[1].object_digests.k.raw.s1[0]",
        ),
        (with_entry(object_digests={"k.raw.s1": [["a" * 64, 7]]}), "segments[1].object_digests.k.raw.s1[0]"),
        (
            with_entry(object_digests={"k.raw.s1": [["a" * 63, "a" * 65]]}),
            "segments[1].object_digests.k.raw.s1[0]",
        ),
    ],
)
def test_manifest_refused(members: Any, where: str) -> None:
    with pytest.raises(ManifestRejected) as caught:
        parse(members)
    assert caught.value.where == where
    assert isinstance(caught.value, PeerFault)
    assert str(caught.value).startswith("manifest: ")


@pytest.mark.requirement("R3.2a")
@pytest.mark.parametrize(
    "name", ["k.raw.s01", "K.raw.s1", "k." + "x" * 33 + ".s1", "k.räw.s1", "q.raw.s1", "manifest.cose"]
)
def test_track_names_of_a_manifest_follow_the_grammar(name: str) -> None:
    with pytest.raises(InvalidName) as said:
        DataTrack.parse(name)
    with pytest.raises(ManifestRejected) as caught:
        parse(with_entry(tracks=["k.raw.s1", name], object_digests=...))
    assert caught.value.reason == str(said.value)


def test_unknown_codec_is_no_fault_of_the_manifest() -> None:
    manifest = parse(with_entry(tracks=["kv.future-codec-9.s1"], object_digests=...))
    assert manifest.segments[1].tracks[0].codec == "future-codec-9"


TEXT = FULL.to_json().decode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        TEXT.encode("utf-16"),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode() + b"x",
        TEXT.replace('"kvcs":1', '"kvcs":1,"kvcs":1').encode(),
        TEXT.replace('"segment":1', '"segment":1,"segment":1').encode(),
        TEXT.replace('"layers":2,"block', '"layers":2.0,"block').encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":NaN').encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":-Infinity').encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":1e400').encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":"\\ud800"').encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"\\udfff":1').encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":"\xff"').encode("latin-1"),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":' + "1" * 5000).encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":' + "[" * 20 + "]" * 20).encode(),
        TEXT.replace('"kvcs":1', '"kvcs":1,"x":' + '{"y":' * 20 + "0" + "}" * 20).encode(),
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_text_that_is_no_manifest(data: bytes) -> None:
    assert Manifest.parse(TEXT.encode()) == FULL
    with pytest.raises(ManifestRejected):
        Manifest.parse(data)


def test_size_is_bounded_before_parsing() -> None:
    data = FULL.to_json()
    assert Manifest.parse(data, max_size=len(data)) == FULL
    with pytest.raises(ManifestRejected, match=f"at most {len(data) - 1} "):
        Manifest.parse(data, max_size=len(data) - 1)
    with pytest.raises(InvalidValue, match=f"more than {len(data) - 1}: list fewer"):
        FULL.to_json(max_size=len(data) - 1)


def test_all_versions_take_little_more_memory_than_the_last() -> None:
    """A prefill in many chunks has many versions, each with the digests of all chunks before it."""
    chunks, layers = 12, DESCRIPTOR.layers
    manifest, versions = Manifest(DESCRIPTOR), []
    for segment in range(chunks):
        manifest = manifest.with_segment(
            [bytes((segment, block)) * 16 for block in range(100)], tracks(segment)
        )
        for layer in range(layers):
            for track in tracks(segment):
                names = [(segment, layer, str(track), block) for block in range(100)]
                manifest = manifest.with_group(track, digests(*names))
            if layer == layers - 1:
                manifest = manifest.with_complete(segment)
            versions.append(manifest.to_pieces())
    kept = {id(piece): len(piece) for pieces in versions for piece in pieces}
    assert sum(sum(map(len, pieces)) for pieces in versions) > 10 * len(manifest.to_json())
    assert sum(kept.values()) < 2.2 * len(manifest.to_json())
    assert Manifest.parse(b"".join(versions[-1])) == manifest


def test_bomb_of_values_costs_little_memory() -> None:
    bomb = b"[" + b"[]," * (MAX_MANIFEST_SIZE // 3 - 8) + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(ManifestRejected, match="values"):
            Manifest.parse(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * MAX_MANIFEST_SIZE


def test_largest_manifest_is_taken() -> None:
    """80 layers, two tracks, so many blocks that 16 MiB are almost full; and one Object in each Group."""
    for layers, blocks in ((80, 1500), (100_000, 1)):
        descriptor = Descriptor.parse({**VECTORS["descriptor"], "layers": layers})
        manifest = Manifest(descriptor).with_segment([bytes(32)] * blocks, tracks(0))
        group = bytes(32 * blocks)
        listed = dict.fromkeys(tracks(0), (group,) * layers)
        manifest = replace(manifest, segments=(replace(manifest.segments[0], object_digests=listed),))
        data = manifest.to_json()
        assert len(data) > 0.8 * MAX_MANIFEST_SIZE
        assert Manifest.parse(data) == manifest


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('abö\\"', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
unknown_members = st.dictionaries(st.text("xyzü", min_size=1, max_size=6), plain_values, max_size=3)


@given(unknown_members, unknown_members, st.booleans(), st.lists(st.integers(1, 4), max_size=4), st.data())
def test_manifest_there_and_back(
    unknown: dict[str, Any], inner: dict[str, Any], deterministic: bool, sizes: list[int], data: st.DataObject
) -> None:
    manifest = Manifest(DESCRIPTOR, deterministic=deterministic, unknown=unknown)
    for segment, blocks in enumerate(sizes):
        manifest = manifest.with_segment(KEYS[:blocks], tracks(segment))
        for track in tracks(segment):
            for layer in range(data.draw(st.integers(0, 2))):
                manifest = manifest.with_group(
                    track, digests(*((track, layer, block) for block in range(blocks)))
                )
        if data.draw(st.booleans()):
            manifest = manifest.with_complete(segment)
    manifest = replace(manifest, segments=tuple(replace(entry, unknown=inner) for entry in manifest.segments))
    parsed = Manifest.parse(manifest.to_json())
    assert parsed == manifest
    assert parsed.to_json() == manifest.to_json()
    check_successor(manifest, parsed)


def test_unknown_members_are_kept_through_versions() -> None:
    members = with_entry(note={"by": "another producer", "n": 2**60})
    members["future"] = ["ü", None]
    manifest = parse(members).with_group(tracks(1)[0], digests("c", "d")).with_complete(1)
    written = json.loads(manifest.to_json())
    assert written["future"] == ["ü", None]
    assert written["segments"][1]["note"] == {"by": "another producer", "n": 2**60}


# Versions


def test_versions_of_a_production_follow_each_other() -> None:
    versions = [Manifest(DESCRIPTOR), Manifest(DESCRIPTOR).with_segment(KEYS[:3], tracks(0))]
    for layer in range(2):
        for track in tracks(0):
            versions.append(
                versions[-1].with_group(track, digests(*((track, layer, block) for block in range(3))))
            )
    versions.append(versions[-1].with_complete(0))
    versions.append(versions[-1].with_segment(KEYS[3:5], tracks(1)))
    for index, known in enumerate(versions):
        for new in versions[index:]:
            check_successor(known, Manifest.parse(new.to_json()))
        for old in versions[:index]:
            with pytest.raises(ManifestRejected):
                check_successor(known, old)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: replace(m, segments=m.segments[:1]), "segments"),
        (lambda m: replace(m, deterministic=True), "deterministic"),
        (lambda m: replace(m, descriptor=Descriptor.parse({**VECTORS["descriptor"], "ext": {}})), "compat"),
        (lambda m: changed(m, 0, complete=False), "segments[0].complete"),
        (lambda m: changed(m, 0, blocks=4), "segments[0].blocks"),
        (lambda m: changed(m, 1, blocks=1), "segments[1].blocks"),
        (lambda m: changed(m, 1, blocks=3), "segments[1].blocks"),
        (lambda m: changed(m, 1, first_block=4), "segments[1].first_block"),
        (lambda m: changed(m, 1, block_keys_sha256=bytes(32)), "segments[1].block_keys_sha256"),
        (lambda m: changed(m, 1, tracks=tuple(tracks(1)[1:])), "segments[1].tracks"),
        (lambda m: changed(m, 1, object_digests={}), "segments[1].object_digests"),
        (lambda m: changed(m, 1, object_digests={tracks(1)[0]: (bytes(64),)}), "segments[1].object_digests"),
        (lambda m: changed(m, 0, object_digests={t: g[:1] for t, g in m.segments[0].object_digests.items()}),
         "segments[0].object_digests"),
    ],
)  # fmt: skip
def test_what_a_later_version_must_not_take_back(change: Callable[[Manifest], Manifest], where: str) -> None:
    with pytest.raises(ManifestRejected) as caught:
        check_successor(FULL, change(FULL))
    assert caught.value.where == where


def changed(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    segments = list(manifest.segments)
    segments[index] = replace(segments[index], **changes)
    return replace(manifest, segments=tuple(segments))


def test_what_a_later_version_may_add() -> None:
    check_successor(FULL, FULL)
    more = (*FULL.segments[1].tracks, DataTrack.parse("kv.x-shuffle-zlib.s1"))
    check_successor(FULL, changed(FULL, 1, tracks=more, unknown={"a": 1}))
    unsettled = Manifest(DESCRIPTOR).with_segment(KEYS[:3], tracks(0))
    grown = Manifest(DESCRIPTOR).with_segment(KEYS[:5], tracks(0))
    check_successor(unsettled, grown)
    with pytest.raises(ManifestRejected, match="blocks"):
        check_successor(grown, unsettled)


def test_a_publisher_cannot_derive_a_wrong_version() -> None:
    k, v = tracks(0)
    for keys, names in (([], [k]), (KEYS[:1], []), (KEYS[:1], [k, k]), (KEYS[:1], tracks(1))):
        with pytest.raises(InvalidValue):
            Manifest(DESCRIPTOR).with_segment(keys, names)
    with pytest.raises(InvalidValue, match="all 2 Groups are listed already"):
        FULL.with_group(k, digests(1, 2, 3))
    for wrong in (digests(1), digests(1, 2, 3), [b"short", bytes(32)]):
        with pytest.raises(InvalidValue, match="a Group has 2 Data Digests"):
            FULL.with_group(tracks(1)[1], wrong)
    with pytest.raises(InvalidValue, match=r"no track kv\.raw\.s1"):
        FULL.with_group(DataTrack.parse("kv.raw.s1"), digests(1, 2))
    for segment in (-1, 2):
        with pytest.raises(InvalidValue, match=f"segment {segment} of 2"):
            FULL.with_complete(segment)
    assert v in FULL.segments[0].tracks


# What a consumer checks


@pytest.mark.requirement("R5f")
def test_compatibility_id_must_be_that_of_the_namespace() -> None:
    check(FULL, NAME)
    # Any change of compat, however it is made to look consistent inside the manifest.
    other = parse(document(compat={**VECTORS["descriptor"], "model": "example/llama-tiny2"}))
    with pytest.raises(ManifestRejected, match=NAME.compat_id.hex()) as caught:
        check(other, NAME)
    assert caught.value.where == "compat"
    check(other, replace(NAME, compat_id=other.descriptor.compat_id))
    # The order of members in transit does not count.
    check(parse(document(compat=dict(reversed(VECTORS["descriptor"].items())))), NAME)


@pytest.mark.requirement("R5g")
def test_segments_that_the_consumers_tokens_confirm() -> None:
    first, second = FULL.segments
    assert confirmed_segments(FULL, NAME, KEYS[:5]) == (first, second)
    assert confirmed_segments(FULL, NAME, KEYS) == (first, second)
    assert confirmed_segments(FULL, NAME, KEYS[:4]) == (first,)
    assert confirmed_segments(FULL, NAME, KEYS[:2]) == ()
    assert confirmed_segments(FULL, NAME, []) == ()
    # The consumer's prompt differs in a token of block 3: segment 1 is of other tokens.
    tokens = [*range(1, 13), 99, *range(14, 41)]
    assert confirmed_segments(FULL, NAME, block_keys(SCOPE, DESCRIPTOR, tokens)) == (first,)
    # ... of block 0, or another scope: nothing is.
    assert confirmed_segments(FULL, NAME, block_keys(SCOPE, DESCRIPTOR, [9, *range(2, 41)])) == ()
    assert confirmed_segments(FULL, NAME, block_keys(ScopeKey.random(), DESCRIPTOR, range(1, 41))) == ()
    # An honest segment 0 under the Anchor Key of another prefix (security 6 #9).
    assert confirmed_segments(FULL, replace(NAME, anchor_key=KEYS[3]), KEYS) == ()
    assert not replace(first, block_keys_sha256=bytes(32)).confirmed_by(KEYS)
