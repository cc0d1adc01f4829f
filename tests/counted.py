"""Numbers and bytes that count how often they are compared: what work a peer can cause, without a clock."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Counted", "CountedField"]


class Counted(int):
    """An ID as a peer might send it. `Counted.comparisons` counts those of all of them."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int.__lt__(self, other)

    def __le__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int.__le__(self, other)

    def __gt__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int.__gt__(self, other)

    def __ge__(self, other: int) -> bool:
        Counted.comparisons += 1
        return int.__ge__(self, other)

    __hash__ = int.__hash__


class CountedField(bytes):
    """A field of a namespace. `CountedField.comparisons` counts those of all of them."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        CountedField.comparisons += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__
