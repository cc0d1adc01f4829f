"""Namespaces of publications and names of tracks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import InvalidName
from kvcs.names import (
    MANIFEST,
    MANIFEST_COSE,
    Component,
    DataTrack,
    PublicationName,
    content_prefix,
    scope_prefix,
)
from moqt.names import check_namespace, is_prefix

# kvsp 2.7, except the Publication ID
SCOPE = bytes.fromhex("264d6b1a0cc92aba987dbe3562897115")
COMPAT = bytes.fromhex("6662fe05aaf8ecc29376f9980509e6cfe0c4fad88d3ce7b8ef0ca96039bf8887")
ANCHOR = bytes.fromhex("2b27a18f4bb0f4973d9a43a530503641023020a9145b54d496904e2aaaed3e40")
PUBLICATION = bytes.fromhex("0123456789abcdef0123456789abcdef")
NAME = PublicationName(SCOPE, COMPAT, ANCHOR, PUBLICATION)
HOLDER = (
    "moqt://relay.example:4433/#kvcs-ns:kvcs.2d1-.26Mk.1a.0c.c9.2a.ba.98.7d.be5b.89q.15-fb.fe.05.aa.f8.ec.c2.93v"
    ".f9.98.05.09.e6.cf.e0.c4.fa.d8.8d.3c.e7.b8.ef.0c.a9.609.bf.88.87-.2b.27.a1.8fK.b0.f4.97.3d.9aC.a50P6A.020"
    ".20.a9.14.5bT.d4.96.90N.2a.aa.ed.3e.40-.01.23Eg.89.ab.cd.ef.01.23Eg.89.ab.cd.ef"
)


@pytest.mark.requirement("R13", "R3.1a")
def test_encoding_example_of_the_namespace() -> None:
    name = PublicationName(
        bytes.fromhex("6d1c6481cd428737da312c089db3832a"),
        bytes.fromhex("5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"),
        bytes.fromhex("653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1"),
        PUBLICATION,
    )
    # A field count, then each field prefixed by its length: one octet for values below 128 (moqt 2.1).
    encoded = bytes([5]) + b"".join(bytes([len(field)]) + field for field in name.namespace)
    assert len(encoded) == 108
    assert encoded == bytes.fromhex(
        """
        05 06 6b 76 63 73 2d 31 10 6d 1c 64 81 cd 42 87
        37 da 31 2c 08 9d b3 83 2a 20 5e d5 c2 f2 38 83
        96 55 d7 c4 02 9e 12 b7 f3 1c af 9e 74 21 f4 ed
        b4 05 7f ee e6 da b7 60 ee 0f 20 65 32 75 88 4c
        a4 4f 89 45 fd 4c 90 26 11 c4 67 39 4b 73 65 6e
        64 c7 8d 85 22 64 8c b7 5a ef c1 10 01 23 45 67
        89 ab cd ef 01 23 45 67 89 ab cd ef
        """
    )
    check_namespace(name.namespace, DataTrack(Component.KV, "x" * 32, 0).name)


@pytest.mark.requirement("R3.1a")
@given(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
def test_namespace_there_and_back(short: bytes, long: bytes) -> None:
    name = PublicationName(short, long, long[::-1], short[::-1])
    assert name.namespace == (b"kvcs-1", short, long, long[::-1], short[::-1])
    assert PublicationName.from_namespace(name.namespace) == name
    assert PublicationName.from_holder(name.holder("moqt://host/p?q=1")) == name


@pytest.mark.requirement("R3.1a")
@given(
    st.lists(st.binary(max_size=40), max_size=7).map(tuple)
    | st.tuples(st.just(b"kvcs-1"), *(st.binary(min_size=15, max_size=33) for _ in range(4)))
)
def test_namespace_of_any_other_shape_is_refused(fields: tuple[bytes, ...]) -> None:
    if [len(field) for field in fields] == [6, 16, 32, 32, 16] and fields[0] == b"kvcs-1":
        assert PublicationName.from_namespace(fields).namespace == fields
    else:
        with pytest.raises(InvalidName):
            PublicationName.from_namespace(fields)


@pytest.mark.requirement("R3.1a")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ((), "has 5 fields, got 0"),
        (NAME.namespace[:4], "has 5 fields, got 4"),
        ((*NAME.namespace, b"x"), "has 5 fields, got 6"),
        ((b"kvcs-2", *NAME.namespace[1:]), 'is "kvcs-1", got "kvcs-2"'),
        ((b"\x1b[2J", *NAME.namespace[1:]), r"\x1b[2J"),
        ((b"kvcs-1", SCOPE[:15], *NAME.namespace[2:]), "field 1 (Scope ID) has 16 octets, got 15"),
        (
            (b"kvcs-1", SCOPE, COMPAT.hex().encode(), ANCHOR, PUBLICATION),
            "Compatibility ID) has 32 octets, got 64",
        ),
        ((b"kvcs-1", SCOPE, COMPAT, b"", PUBLICATION), "field 3 (Anchor Key) has 32 octets, got 0"),
        ((*NAME.namespace[:4], PUBLICATION + b"x"), "field 4 (Publication ID) has 16 octets, got 17"),
    ],
)
def test_what_is_said_of_a_wrong_namespace(fields: tuple[bytes, ...], says: str) -> None:
    with pytest.raises(InvalidName, match=re.escape(says)):
        PublicationName.from_namespace(fields)


def test_prefixes() -> None:
    assert scope_prefix(SCOPE) == NAME.namespace[:2]
    assert content_prefix(SCOPE, COMPAT, ANCHOR) == NAME.namespace[:4]
    assert is_prefix(scope_prefix(SCOPE), NAME.namespace)
    with pytest.raises(InvalidName):
        scope_prefix(COMPAT)
    with pytest.raises(InvalidName):
        content_prefix(SCOPE, COMPAT, SCOPE)
    with pytest.raises(InvalidName):
        PublicationName(SCOPE, COMPAT, ANCHOR, b"")


def test_new_publications_have_their_own_ids() -> None:
    names = {PublicationName.new(SCOPE, COMPAT, ANCHOR) for _ in range(100)}
    assert len(names) == 100
    assert {name.namespace[:4] for name in names} == {NAME.namespace[:4]}


def test_holder_of_the_test_vectors() -> None:
    assert NAME.holder("moqt://relay.example:4433/") == HOLDER
    assert PublicationName.from_holder(HOLDER) == NAME


@pytest.mark.parametrize(
    "holder",
    [
        "",
        "moqt://relay.example/",
        "moqt://relay.example/#other:kvcs.2d1",
        "moqt://relay.example/#kvcs-ns:",
        "moqt://relay.example/#kvcs-ns:kvcs.2d1",
        HOLDER.replace(".aa", ".AA"),
        HOLDER + "-x",
        HOLDER[:-3],
    ],
)
def test_holder_refused(holder: str) -> None:
    with pytest.raises(InvalidName):
        PublicationName.from_holder(holder)


@pytest.mark.requirement("R12")
def test_components() -> None:
    assert [(component.text, component.value) for component in Component] == [("k", 1), ("v", 2), ("kv", 3)]
    with pytest.raises(ValueError, match="0"):
        Component(0)
    for name in (MANIFEST, MANIFEST_COSE):
        with pytest.raises(InvalidName, match="is a manifest track"):
            DataTrack.parse(name)
    assert (MANIFEST, MANIFEST_COSE) == (b"manifest", b"manifest.cose")


@pytest.mark.requirement("R3.2a")
@given(
    st.sampled_from(Component),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=32),
    st.integers(0, 2**53 - 1),
)
def test_track_name_there_and_back(component: Component, codec: str, segment: int) -> None:
    track = DataTrack(component, codec, segment)
    assert track.name == f"{component.text}.{codec}.s{segment}".encode()
    assert DataTrack.parse(track.name) == track
    assert DataTrack.parse(str(track)) == track


# kvcs 3.2, written a second time, with the bound that a manifest sets to segment numbers
GRAMMAR = re.compile(rb"(?:k|v|kv)\.[a-z0-9\-]{1,32}\.s(?:0|[1-9][0-9]*)")


@pytest.mark.requirement("R3.2a")
@given(
    st.text("kv.raws019-AKm\n ", max_size=14).map(str.encode)
    | st.from_regex(GRAMMAR)
    | st.binary(max_size=12)
)
def test_track_names_are_those_of_the_grammar(name: bytes) -> None:
    if GRAMMAR.fullmatch(name) and int(name.rpartition(b"s")[2]) < 2**53:
        assert DataTrack.parse(name).name == name
    else:
        with pytest.raises(InvalidName):
            DataTrack.parse(name)


@pytest.mark.requirement("R3.2a")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "k",
        "k.raw",
        "k.raw.0",
        "k.raw.s",
        "k.raw.s01",
        "k.raw.s00",
        "k.raw.s-1",
        "k.raw.s+1",
        "k.raw.s1.",
        "k.raw.s1\n",
        " k.raw.s1",
        "K.raw.s0",
        "k.Raw.s0",
        "k.raw.S0",
        "k..s0",
        "k." + "x" * 33 + ".s0",
        "k.ra_w.s0",
        "k.ra.w.s0",
        "k.räw.s0",
        "k.raw.s٣",
        "vk.raw.s0",
        "kv.raw.s9007199254740992",
        "k.raw.s" + "9" * 5000,
        "manifest.s0",
        "Manifest",
        "k\x00.raw.s0",
        "k.raw.s0\ud800",
    ],
)
def test_malformed_track_name(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        DataTrack.parse(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.requirement("R3.2a")
@pytest.mark.parametrize(
    ("codec", "segment"),
    [("", 0), ("RAW", 0), ("x" * 33, 0), ("a.b", 0), ("raw", -1), ("raw.s1", 0), ("raw", 2**53)],
)
def test_track_that_has_no_name_cannot_be_made(codec: str, segment: int) -> None:
    with pytest.raises(InvalidName):
        DataTrack(Component.K, codec, segment)
