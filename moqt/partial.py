"""How much of Objects that have not come whole a session holds (moqt 21)."""

from __future__ import annotations

from moqt.quic.api import Stream

__all__ = ["Partial"]


class Partial:
    """Counts the bytes of Objects in part, over all data streams of a session.

    When they are more than `limit`, streams have to go: to leave them unread would use up the window of the
    connection, and with it stop the streams that are wanted. The one whose Object began first may stay.
    """

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit
        self._held: dict[Stream, int] = {}

    def take(self, stream: Stream, size: int) -> bool:
        """So much more of an Object has come, and not its end. False: the stream has to go."""
        self._held[stream] = self._held.get(stream, 0) + size
        self.bytes += size
        return self.bytes <= self._limit or next(iter(self._held)) is stream

    def give(self, stream: Stream) -> None:
        """The Object has come whole, or nothing more of it comes. No effect when nothing was taken."""
        self.bytes -= self._held.pop(stream, 0)
