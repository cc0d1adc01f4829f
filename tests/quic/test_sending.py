"""What a stream still has to send: pieces that are not copied, against one plain string of octets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moqt.quic.sending import MERGED, Pieces

SIZES = st.one_of(st.integers(1, 40), st.sampled_from((MERGED - 1, MERGED, MERGED + 1, 3 * MERGED)))


@given(st.data())
def test_pieces_are_one_string(data: st.DataObject) -> None:
    pieces = Pieces()
    whole = b""
    dropped = 0
    for number in range(data.draw(st.integers(1, 12))):
        more = bytes((number,)) * data.draw(SIZES)
        pieces.append(len(whole), more)
        whole += more
        start = data.draw(st.integers(dropped, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        assert pieces.get(start, stop) == whole[start:stop]
        dropped = data.draw(st.integers(dropped, len(whole)))
        pieces.drop(dropped)
        assert pieces.get(dropped, len(whole)) == whole[dropped:]


def test_large_pieces_are_not_copied() -> None:
    pieces = Pieces()
    memory = bytearray(MERGED + 1)
    pieces.append(0, memoryview(memory))
    memory[7] = 1
    assert pieces.get(7, 8) == b"\x01"


def test_a_bytearray_may_be_used_again() -> None:
    pieces = Pieces()
    memory = bytearray(MERGED + 1)
    pieces.append(0, memory)
    memory.clear()
    assert pieces.get(0, MERGED + 1) == bytes(MERGED + 1)


def test_what_was_dropped_is_let_go() -> None:
    pieces = Pieces()
    memory = bytearray(MERGED + 1)
    pieces.append(0, memoryview(memory))
    pieces.append(MERGED + 1, bytes(MERGED))
    pieces.drop(MERGED)
    assert pieces.get(MERGED, MERGED + 2) == bytes(2)
    pieces.drop(MERGED + 1)
    memory.clear()  # impossible while a view of it is kept
