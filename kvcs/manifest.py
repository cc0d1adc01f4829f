"""The manifest of a publication: model, JSON, versions, and what a consumer checks (kvcs 5).

A `Manifest` is a value. A publisher derives each version from the one before (`with_segment`, `with_group`,
`with_complete`); a consumer parses what came and compares it with what it knows (`check`, `check_successor`,
`confirmed_segments`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Final, NoReturn

from kvcs import strict_json
from kvcs.errors import InvalidDescriptor, InvalidName, InvalidValue, ManifestRejected
from kvcs.identity import Descriptor, block_keys_digest
from kvcs.names import DataTrack, PublicationName
from kvcs.strict_json import Json, is_hex64, is_integer
from moqt.names import printable

KVCS_VERSION: Final = 1
MAX_MANIFEST_SIZE: Final = 16 * 1024 * 1024  # octets; about 240,000 listed Objects (security 4.4)
MAX_SEGMENTS: Final = 4096
MAX_TRACKS: Final = 64  # of one segment
MAX_BLOCKS: Final = 2**32  # of one segment: Block Index has 32 bits
DIGEST_SIZE: Final = 32  # octets

_MAX_VALUES: Final = 600_000  # enough for the largest manifest, even with one Object per Group
_MAX_DEPTH: Final = 16  # of members that we do not know
_MEMBERS: Final = ("kvcs", "compat", "layers", "block_tokens", "deterministic", "segments")
_ENTRY_MEMBERS: Final = ("segment", "first_block", "blocks", "block_keys_sha256", "tracks", "complete")
_LOWER_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One segment as the manifest describes it: `blocks` blocks from absolute block `first_block` on."""

    segment: int
    first_block: int
    blocks: int
    block_keys_sha256: bytes
    tracks: tuple[DataTrack, ...]
    complete: bool = False
    object_digests: Mapping[DataTrack, tuple[bytes, ...]] = field(default_factory=dict)
    """For a track: one string per completed Group, in order: its Objects' Data Digests, concatenated."""
    unknown: Mapping[str, Json] = field(default_factory=dict)
    """JSON members that are not ours, kept when written again (kvcs 14 #14)."""
    _groups: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)
    """The JSON of each listed Group, which all versions share that are derived from one another."""
    _whole: list[bytes] = field(init=False, default_factory=list, compare=False, repr=False)
    """The JSON of this entry, once it was written, if it is complete."""

    def absolute_block(self, object_id: int) -> int:
        """The absolute index of the block that is Object `object_id` of this segment."""  # kvcs 3.4
        return self.first_block + object_id

    def listed_digest(self, track: DataTrack, layer: int, object_id: int) -> bytes | None:
        """The Data Digest listed for an Object of Group `layer`; None where the manifest lists none."""
        groups = self.object_digests.get(track, ())
        if not (0 <= layer < len(groups) and 0 <= object_id < self.blocks):
            return None
        return groups[layer][object_id * DIGEST_SIZE : (object_id + 1) * DIGEST_SIZE]

    def confirmed_by(self, keys: Sequence[bytes]) -> bool:
        """Whether `keys`, the Block Keys of a consumer's tokens from block 0 on, cover this very segment."""
        own = keys[self.first_block : self.first_block + self.blocks]
        return len(own) == self.blocks and compare_digest(block_keys_digest(own), self.block_keys_sha256)

    def to_pieces(self) -> list[bytes]:
        """The JSON of the entry in pieces, of which the large ones are kept for the next version."""
        if self._whole:
            return self._whole
        members: dict[str, Json] = {
            "segment": self.segment,
            "first_block": self.first_block,
            "blocks": self.blocks,
            "block_keys_sha256": self.block_keys_sha256.hex(),
            "tracks": [str(track) for track in self.tracks],
            "complete": self.complete,
        }
        pieces = [_json(members)[:-1]]
        for number, (track, groups) in enumerate(self.object_digests.items()):
            pieces.append(
                b",%b:[" % _json(str(track)) if number else b',"object_digests":{%b:[' % _json(str(track))
            )
            for index, group in enumerate(groups):
                pieces += [b","] * bool(index)
                pieces.append(self._groups.get(group) or self._groups.setdefault(group, _group_json(group)))
            pieces.append(b"]")
        pieces.append((b"}" if self.object_digests else b"") + _further(self.unknown))
        if self.complete:
            self._whole.append(b"".join(pieces))
        return self._whole or pieces


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a manifest. The JSON holds no version number: that is the Group ID."""

    descriptor: Descriptor
    segments: tuple[SegmentEntry, ...] = ()
    """Segment n stands at index n; each one starts where the one before ends."""
    deterministic: bool = False
    """True only if the publisher guarantees bit-identical Objects for equal content fields (kvcs 5)."""
    unknown: Mapping[str, Json] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The blocks of all segments: the absolute index of the next block."""
        return self.segments[-1].first_block + self.segments[-1].blocks if self.segments else 0

    def with_segment(self, keys: Sequence[bytes], tracks: Iterable[DataTrack]) -> Manifest:
        """The version with one more segment, whose blocks have the Block Keys `keys`, in the given tracks."""
        entry = SegmentEntry(
            segment=len(self.segments),
            first_block=self.blocks,
            blocks=len(keys),
            block_keys_sha256=block_keys_digest(keys),
            tracks=tuple(tracks),
        )
        for track in entry.tracks:
            if track.segment != entry.segment:
                raise InvalidValue(f"the next segment is {entry.segment}, but {track} is of another one")
        if not keys or not entry.tracks or len(set(entry.tracks)) != len(entry.tracks):
            raise InvalidValue("a segment has at least one block and at least one track, no track twice")
        return replace(self, segments=(*self.segments, entry))

    def with_group(self, track: DataTrack, digests: Sequence[bytes]) -> Manifest:
        """The version that also lists the next completed Group of `track`, by its Objects' Data Digests."""
        entry = self._entry(track.segment)
        listed = entry.object_digests.get(track, ())
        if track not in entry.tracks:
            raise InvalidValue(f"segment {entry.segment} has no track {track}")
        if len(listed) == self.descriptor.layers:
            raise InvalidValue(f"{track}: all {self.descriptor.layers} Groups are listed already")
        if len(digests) != entry.blocks or any(len(digest) != DIGEST_SIZE for digest in digests):
            raise InvalidValue(f"{track}: a Group has {entry.blocks} Data Digests of {DIGEST_SIZE} octets")
        group = b"".join(digests)
        return self._with_entry(
            replace(entry, object_digests={**entry.object_digests, track: (*listed, group)})
        )

    def with_complete(self, segment: int) -> Manifest:
        """The version that marks `segment` complete."""
        return self._with_entry(replace(self._entry(segment), complete=True))

    def to_pieces(self, *, max_size: int = MAX_MANIFEST_SIZE) -> list[bytes]:
        """The payload of the manifest track, the same octets in every process, in pieces.

        Versions that are derived from one another share what they have in common, so that all versions of
        a publication take little more memory than the last. Raises InvalidValue if it is larger than
        `max_size` octets: consumers would refuse it.
        """
        members = {
            "kvcs": KVCS_VERSION,
            "compat": self.descriptor.members(),
            "layers": self.descriptor.layers,
            "block_tokens": self.descriptor.block_tokens,
            "deterministic": self.deterministic,
        }
        pieces = [_json(members)[:-1] + b',"segments":[']
        for index, entry in enumerate(self.segments):
            pieces += [b","] * bool(index)
            pieces += entry.to_pieces()
        pieces.append(b"]" + _further(self.unknown))
        size = sum(map(len, pieces))
        if size > max_size:
            raise InvalidValue(
                f"the manifest has {size} octets, more than {max_size}: list fewer object_digests, "
                "or choose larger blocks"
            )
        return pieces

    def to_json(self, *, max_size: int = MAX_MANIFEST_SIZE) -> bytes:
        """The same in one piece. Raises InvalidValue as `to_pieces` does."""
        return b"".join(self.to_pieces(max_size=max_size))

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, *, max_size: int = MAX_MANIFEST_SIZE) -> Manifest:
        """Read what a peer published. Raises ManifestRejected with the member at fault.

        Takes time in proportion to the size: parse off the event loop what has more than 256 KiB.
        """
        try:
            members = strict_json.loads(data, max_size=max_size, max_values=_MAX_VALUES)
        except ValueError as error:
            raise ManifestRejected("", str(error)) from None
        if not isinstance(members, dict):
            _reject("", "a JSON object", members)
        _require(members, _MEMBERS, "")
        if type(members["kvcs"]) is not int or members["kvcs"] != KVCS_VERSION:
            _reject("kvcs", str(KVCS_VERSION), members["kvcs"])
        try:
            if not isinstance(members["compat"], dict):
                _reject("compat", "a JSON object", members["compat"])
            descriptor = Descriptor.parse(members["compat"])
        except InvalidDescriptor as error:
            raise ManifestRejected("compat", str(error)) from None
        for name, value in (("layers", descriptor.layers), ("block_tokens", descriptor.block_tokens)):
            if type(members[name]) is not int or members[name] != value:
                _reject(name, f"{value} as in compat", members[name])
        if not isinstance(members["deterministic"], bool):
            _reject("deterministic", "true or false", members["deterministic"])
        entries = members["segments"]
        if not isinstance(entries, list) or len(entries) > MAX_SEGMENTS:
            _reject("segments", f"an array of at most {MAX_SEGMENTS} segments", entries)
        segments: list[SegmentEntry] = []
        first_block = 0
        for index, entry in enumerate(entries):
            segments.append(_parse_entry(entry, index, first_block, descriptor.layers))
            first_block += segments[-1].blocks
        return cls(descriptor, tuple(segments), members["deterministic"], _unknown(members, _MEMBERS, ""))

    def _entry(self, segment: int) -> SegmentEntry:
        if not 0 <= segment < len(self.segments):
            raise InvalidValue(f"segment {segment} of {len(self.segments)}")
        return self.segments[segment]

    def _with_entry(self, entry: SegmentEntry) -> Manifest:
        before, after = self.segments[: entry.segment], self.segments[entry.segment + 1 :]
        return replace(self, segments=(*before, entry, *after))


def check(manifest: Manifest, publication: PublicationName) -> None:
    """Raise ManifestRejected unless "compat" has the Compatibility ID of the namespace."""
    # kvcs 5: a consumer MUST compute it, and discard the publication if it differs.
    if not compare_digest(manifest.descriptor.compat_id, publication.compat_id):
        raise ManifestRejected(
            "compat",
            f"its Compatibility ID is {manifest.descriptor.compat_id.hex()}, but the namespace says "
            f"{publication.compat_id.hex()}",
        )


def confirmed_segments(
    manifest: Manifest, publication: PublicationName, keys: Sequence[bytes]
) -> tuple[SegmentEntry, ...]:
    """The segments that a consumer may use: those that its own Block Keys confirm, from segment 0 on.

    `keys` are the Block Keys of the consumer's tokens from block 0 on. The first segment that they do not
    confirm ends the list, as does a segment 0 whose last key is not the Anchor Key (kvcs 14 #7).
    """
    confirmed = []
    for entry in manifest.segments:
        if not entry.confirmed_by(keys):
            break
        if entry.segment == 0 and not compare_digest(keys[entry.blocks - 1], publication.anchor_key):
            break
        confirmed.append(entry)
    return tuple(confirmed)


def check_successor(known: Manifest, new: Manifest) -> None:
    """Raise ManifestRejected unless `new` may follow `known`: a manifest takes back nothing (security 6 #8).

    A segment that is not complete, and of which no Group is listed yet, may still grow in blocks.
    """
    if new.descriptor.json != known.descriptor.json:
        raise ManifestRejected("compat", "another Compatibility Descriptor than before")
    if new.deterministic != known.deterministic:
        raise ManifestRejected("deterministic", "another value than before")
    if len(new.segments) < len(known.segments):
        raise ManifestRejected("segments", f"{len(new.segments)}, but {len(known.segments)} before")
    for old, entry in zip(known.segments, new.segments, strict=False):
        where = f"segments[{entry.segment}]"
        if entry.first_block != old.first_block:
            raise ManifestRejected(
                f"{where}.first_block", f"{entry.first_block}, but {old.first_block} before"
            )
        settled = old.complete or any(old.object_digests.values())
        if entry.blocks < old.blocks or (settled and entry.blocks != old.blocks):
            raise ManifestRejected(f"{where}.blocks", f"{entry.blocks}, but {old.blocks} before")
        if entry.blocks == old.blocks and entry.block_keys_sha256 != old.block_keys_sha256:
            raise ManifestRejected(f"{where}.block_keys_sha256", "another value than before")
        if not set(old.tracks) <= set(entry.tracks):
            raise ManifestRejected(f"{where}.tracks", "a track is gone that was there before")
        if old.complete and not entry.complete:
            raise ManifestRejected(f"{where}.complete", "false, but true before")
        for track, groups in old.object_digests.items():
            if entry.object_digests.get(track, ())[: len(groups)] != groups:
                raise ManifestRejected(f"{where}.object_digests", f"{track}: other digests than before")


def _json(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _group_json(group: bytes) -> bytes:
    digits = group.hex()
    return _json([digits[start : start + 64] for start in range(0, len(digits), 64)])


def _further(unknown: Mapping[str, Json]) -> bytes:
    """The end of an object that has further members."""
    return b"," + _json(dict(unknown))[1:] if unknown else b"}"


def _parse_entry(members: Json, index: int, first_block: int, layers: int) -> SegmentEntry:
    where = f"segments[{index}]"
    if not isinstance(members, dict):
        _reject(where, "a JSON object", members)
    _require(members, _ENTRY_MEMBERS, where)
    # Segments are contiguous ranges, and later ones are appended (kvcs 2).
    for name, value in (("segment", index), ("first_block", first_block)):
        if type(members[name]) is not int or members[name] != value:
            _reject(f"{where}.{name}", str(value), members[name])
    blocks = members["blocks"]
    if not is_integer(blocks, 1, MAX_BLOCKS):
        _reject(f"{where}.blocks", f"an integer 1..{MAX_BLOCKS}", blocks)
    if not is_hex64(members["block_keys_sha256"]):
        _reject(f"{where}.block_keys_sha256", "64 lower-case hex digits", members["block_keys_sha256"])
    if not isinstance(members["complete"], bool):
        _reject(f"{where}.complete", "true or false", members["complete"])
    tracks = _parse_tracks(members["tracks"], index, f"{where}.tracks")
    digests = members.get("object_digests", {})
    return SegmentEntry(
        segment=index,
        first_block=first_block,
        blocks=blocks,
        block_keys_sha256=bytes.fromhex(members["block_keys_sha256"]),
        tracks=tracks,
        complete=members["complete"],
        object_digests=_parse_digests(digests, tracks, layers, blocks, f"{where}.object_digests"),
        unknown=_unknown(members, (*_ENTRY_MEMBERS, "object_digests"), where),
    )


def _parse_tracks(names: Json, segment: int, where: str) -> tuple[DataTrack, ...]:
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_TRACKS:
        _reject(where, f"an array of 1 to {MAX_TRACKS} track names", names)
    tracks = []
    for name in names:
        try:
            if not isinstance(name, str):
                _reject(where, "track names", name)
            track = DataTrack.parse(name)
        except InvalidName as error:
            raise ManifestRejected(where, str(error)) from None
        if track.segment != segment:
            _reject(where, f"tracks of segment {segment}", name)
        if track in tracks:
            _reject(where, "each track once", name)
        tracks.append(track)
    return tuple(tracks)


def _parse_digests(
    members: Json, tracks: Sequence[DataTrack], layers: int, blocks: int, where: str
) -> dict[DataTrack, tuple[bytes, ...]]:
    if not isinstance(members, dict):
        _reject(where, "a JSON object", members)
    by_name = {str(track): track for track in tracks}
    digests = {}
    for name, groups in members.items():
        if name not in by_name:
            _reject(where, "tracks of this segment", name)
        if not isinstance(groups, list) or len(groups) > layers:
            _reject(f"{where}.{name}", f"an array of at most {layers} Groups", groups)
        digests[by_name[name]] = tuple(
            _parse_group(group, blocks, f"{where}.{name}[{index}]") for index, group in enumerate(groups)
        )
    return digests


def _parse_group(group: Json, blocks: int, where: str) -> bytes:
    if not isinstance(group, list) or len(group) != blocks:
        _reject(where, f"an array of {blocks} digests", group)
    if all(isinstance(digest, str) and len(digest) == 64 for digest in group):
        digits = "".join(group)
        if _LOWER_HEX.fullmatch(digits):
            return bytes.fromhex(digits)
    return _reject(where, "digests of 64 lower-case hex digits", group)


def _unknown(members: Mapping[str, Json], known: Sequence[str], where: str) -> dict[str, Json]:
    unknown = {name: value for name, value in members.items() if name not in known}
    try:
        strict_json.check_plain(unknown, max_depth=_MAX_DEPTH, narrow=False)
    except ValueError as error:
        raise ManifestRejected(where, str(error)) from None
    return unknown


def _require(members: Mapping[str, Json], names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in members:
            raise ManifestRejected(where, f'no member "{name}"')


def _reject(where: str, expected: str, got: Json) -> NoReturn:
    if isinstance(got, list | dict):
        shown = f"{'an array' if isinstance(got, list) else 'an object'} of {len(got)}"
    else:
        shown = printable(str(json.dumps(got)), 80)
    raise ManifestRejected(where, f"expected {expected}, got {shown}")
