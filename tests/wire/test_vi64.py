"""vi64 and the cursor over complete bytes (moqt 2.1, 26.1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.wire import Reader, encode_vi64, read_vi64, size
from moqt.wire.vi64 import encode_namespace

MAX = 2**64 - 1

SHORTEST = {
    "25": 37,
    "bbbd": 15293,
    "ed7f3e7d": 226442877,
    "faa1a0e403d8": 2893212287960,
    "fc8998abc66bc0": 151288809941952,
    "fefa318fa8e3ca11": 70423237261249041,
    "ffffffffffffffffff": MAX,
    "40": 64,
    "7f": 127,
    "8080": 128,
    "bfff": 16383,
    "c04000": 16384,
    "dfffff": 2097151,
    "e0200000": 2097152,
    "feffffffffffffff": 2**56 - 1,
    "ff0100000000000000": 2**56,
}
LONGER = {"8025": 37, "c00000": 0, "8000": 0, "ff0000000000000001": 1, "ff0000000000000000": 0}


@pytest.mark.parametrize(("text", "value"), (SHORTEST | LONGER).items())
def test_decodes(text: str, value: int) -> None:
    data = bytes.fromhex(text)
    assert read_vi64(data, 0) == (value, len(data))
    assert read_vi64(memoryview(b"\xff" + data + b"\x00"), 1) == (value, 1 + len(data))
    assert Reader(data).vi64() == value


@pytest.mark.parametrize(("text", "value"), SHORTEST.items())
def test_encodes_shortest(text: str, value: int) -> None:
    assert encode_vi64(value).hex() == text
    assert size(value) == len(text) // 2


@pytest.mark.parametrize("text", [*SHORTEST, *LONGER])
def test_cut_off_needs_more(text: str) -> None:
    data = bytes.fromhex(text)
    for length in range(len(data)):
        assert read_vi64(data[:length], 0) is None
        with pytest.raises(ProtocolError, match="cut off"):
            Reader(data[:length]).vi64()


@pytest.mark.parametrize("extra", range(9))
def test_size_changes_where_the_table_says(extra: int) -> None:
    largest = 2 ** (7 * (extra + 1)) - 1 if extra < 8 else MAX
    assert size(largest) == len(encode_vi64(largest)) == extra + 1
    if extra < 8:
        assert size(largest + 1) == len(encode_vi64(largest + 1)) == extra + 2


@pytest.mark.parametrize("value", [-1, MAX + 1])
def test_refuses_what_has_no_encoding(value: int) -> None:
    with pytest.raises(UsageError):
        encode_vi64(value)
    with pytest.raises(UsageError):
        size(value)


@given(st.integers(0, MAX))
def test_round_trip(value: int) -> None:
    encoded = encode_vi64(value)
    assert len(encoded) == size(value)
    assert read_vi64(encoded, 0) == (value, len(encoded))


def test_reader_never_trusts_a_length() -> None:
    with pytest.raises(ProtocolError, match="announced and 2 are left"):
        Reader(encode_vi64(MAX) + b"ab").prefixed()
    with pytest.raises(ProtocolError, match="fields are announced"):
        Reader(encode_vi64(MAX) + b"ab").namespace()


def test_reader_reports_its_own_code_and_name() -> None:
    reader = Reader(b"ab", what="Token", code=SessionCode.KEY_VALUE_FORMATTING_ERROR)
    assert reader.uint8() == ord("a")
    with pytest.raises(ProtocolError, match="Token: 1 bytes are left over") as caught:
        reader.end()
    assert caught.value.code is SessionCode.KEY_VALUE_FORMATTING_ERROR
    assert reader.rest() == b"b"
    reader.end()


@pytest.mark.parametrize(
    ("namespace", "legal"),
    [
        ((), True),
        ((b"a",) * 32, True),
        ((b"a",) * 33, False),
        ((b"a", b""), False),
        ((b"a" * 4096,), True),
        ((b"a" * 4096, b"a"), False),
    ],
)
def test_namespace_limits_hold_both_ways(namespace: tuple[bytes, ...], legal: bool) -> None:
    encoded = encode_vi64(len(namespace)) + b"".join(encode_vi64(len(field)) + field for field in namespace)
    if legal:
        assert encode_namespace(namespace) == encoded
        assert Reader(encoded).namespace() == namespace
    else:
        with pytest.raises(UsageError):
            encode_namespace(namespace)
        with pytest.raises(ProtocolError):
            Reader(encoded).namespace()
