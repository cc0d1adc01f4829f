"""What can go wrong, and whose fault it was.

::

    MoqtError
    ├── ProtocolError                 the peer broke the protocol: the session must close with .code
    ├── SessionClosed                 the session ended with an application close, ours or the peer's
    ├── ConnectionLost                the network: idle time-out, transport error, refused, TLS failure
    ├── StreamReset                   the peer reset the stream that we read
    ├── StreamStopped                 the peer sent STOP_SENDING for the stream that we write
    ├── RequestRejected               the peer answered REQUEST_ERROR
    ├── RequestRefused                our own handler: answer REQUEST_ERROR
    ├── MalformedTrack                the publisher: cancel the track, keep the session
    ├── DeadlineExceeded              a deadline (also a TimeoutError)
    └── UsageError                    the caller (also a ValueError)
        └── LocationTaken             a second payload at one Location

`moqt.quic.api` adds ConnectionClosed and NoStreamCredit, which do not leave the session.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from moqt.names import printable

if TYPE_CHECKING:
    from moqt.wire.messages import Redirect


class SessionCode(IntEnum):
    """Why a session ended: code of the QUIC application close (moqt 17.1)."""

    NO_ERROR = 0x0
    INTERNAL_ERROR = 0x1
    UNAUTHORIZED = 0x2
    PROTOCOL_VIOLATION = 0x3
    INVALID_REQUEST_ID = 0x4
    DUPLICATE_TRACK_ALIAS = 0x5
    KEY_VALUE_FORMATTING_ERROR = 0x6
    INVALID_PATH = 0x8
    MALFORMED_PATH = 0x9
    GOAWAY_TIMEOUT = 0x10
    CONTROL_MESSAGE_TIMEOUT = 0x11
    DATA_STREAM_TIMEOUT = 0x12
    AUTH_TOKEN_CACHE_OVERFLOW = 0x13
    DUPLICATE_AUTH_TOKEN_ALIAS = 0x14
    MALFORMED_AUTH_TOKEN = 0x16
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    EXPIRED_AUTH_TOKEN = 0x18
    INVALID_AUTHORITY = 0x19
    MALFORMED_AUTHORITY = 0x1A
    TOO_MANY_REQUEST_UPDATES = 0x1B


class RequestCode(IntEnum):
    """Why a request failed: code of REQUEST_ERROR (moqt 17.2)."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TIMEOUT = 0x2
    NOT_SUPPORTED = 0x3
    MALFORMED_AUTH_TOKEN = 0x4
    EXPIRED_AUTH_TOKEN = 0x5
    GOING_AWAY = 0x6
    EXCESSIVE_LOAD = 0x9
    DOES_NOT_EXIST = 0x10
    INVALID_RANGE = 0x11
    MALFORMED_TRACK = 0x12
    # Not in the registry of draft-22, which asks for a rejection by this name all the same (moqt 25 #4).
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    UNINTERESTED = 0x20
    PREFIX_OVERLAP = 0x30
    NAMESPACE_TOO_LARGE = 0x31
    UNSUPPORTED_EXTENSION = 0x33
    REDIRECT = 0x34
    CONFLICTING_FILTERS = 0x35
    INVALID_FILTER = 0x36


class DoneCode(IntEnum):
    """Why a publisher ended a subscription: status of PUBLISH_DONE (moqt 17.3)."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TRACK_ENDED = 0x2
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    EXPIRED = 0x6
    UPDATE_FAILED = 0x8
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class ResetCode(IntEnum):
    """Why a stream was reset or stopped: code of RESET_STREAM and STOP_SENDING (moqt 17.4)."""

    INTERNAL_ERROR = 0x0
    CANCELLED = 0x1
    DELIVERY_TIMEOUT = 0x2
    SESSION_CLOSED = 0x3
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    UNKNOWN_OBJECT_STATUS = 0x6
    EXPIRED_AUTH_TOKEN = 0x7
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


CodeTable = TypeVar("CodeTable", SessionCode, RequestCode, DoneCode, ResetCode)


def meaning(table: type[CodeTable], code: int) -> CodeTable:
    """What a received code means: an unknown one is INTERNAL_ERROR of its table (moqt 17)."""
    try:
        return table(code)
    except ValueError:
        return table.INTERNAL_ERROR


def code_text(table: type[CodeTable], code: int) -> str:
    """A code for logs: its name and number, or the number alone if it is not in the table."""
    return f"{table(code).name} (0x{code:x})" if code in table._value2member_map_ else f"code 0x{code:x}"


class MoqtError(Exception):
    """Everything that `moqt` raises on purpose."""


class ProtocolError(MoqtError):
    """The peer broke the protocol; the session must close with `code`. Raised by decoders."""

    def __init__(self, code: SessionCode, reason: str) -> None:
        super().__init__(f"{code_text(SessionCode, code)}: {reason}")
        self.code = code
        self.reason = reason


class SessionClosed(MoqtError):
    """The session ended with an application close; `remote` tells whether the peer closed it.

    `code` is what stood on the wire: `meaning(SessionCode, code)` interprets it.
    """

    def __init__(self, code: int, reason: str, remote: bool) -> None:
        who = "the peer" if remote else "we"
        tail = f": {printable(reason)}" if reason else ""
        super().__init__(f"{who} closed the session with {code_text(SessionCode, code)}{tail}")
        self.code = code
        self.reason = reason
        self.remote = remote


class ConnectionLost(MoqtError):
    """The network's fault: idle time-out, transport error, connection refused, TLS failure."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"connection lost: {reason}" if reason else "connection lost")
        self.reason = reason


class StreamReset(MoqtError):
    """The peer reset the stream that we read: what came so far is not the whole."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the peer reset the stream with {code_text(ResetCode, code)}")
        self.code = code


class StreamStopped(MoqtError):
    """The peer sent STOP_SENDING for the stream that we write."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the peer stopped the stream with {code_text(ResetCode, code)}")
        self.code = code


class RequestRejected(MoqtError):
    """The peer answered REQUEST_ERROR to `what`.

    `retry_after` is in seconds (0.0: at once), None when the peer asks not to retry. `redirect` comes with
    REDIRECT only.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        retry_after: float | None = None,
        redirect: Redirect | None = None,
        what: str = "the request",
    ) -> None:
        tail = f": {printable(reason)}" if reason else ""
        super().__init__(f"the peer rejected {what} with {code_text(RequestCode, code)}{tail}")
        self.code = code
        self.reason = reason
        self.retry_after = retry_after
        self.redirect = redirect
        self.what = what


class RequestRefused(MoqtError):
    """Raised by our own handlers to make the session answer REQUEST_ERROR. `reason` is sent to the peer.

    `redirect` says where to ask instead; it comes with REDIRECT, and only with it. Raises UsageError.
    """

    def __init__(self, code: RequestCode, reason: str, redirect: Redirect | None = None) -> None:
        super().__init__(f"{code_text(RequestCode, code)}: {reason}")
        if (code is RequestCode.REDIRECT) != (redirect is not None):
            raise UsageError("REDIRECT, and nothing else, says where to ask instead")
        self.code = code
        self.reason = reason
        self.redirect = redirect


class MalformedTrack(MoqtError):
    """A track breaks the rules of moqt 20.1: cancel it with MALFORMED_TRACK (0x12), keep the session."""


class DeadlineExceeded(MoqtError, TimeoutError):
    """`what` did not happen within `seconds`."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what}: nothing within {seconds:g} s")
        self.what = what
        self.seconds = seconds


class UsageError(MoqtError, ValueError):
    """The caller's fault: an argument that the protocol does not allow, or a call at the wrong time."""


class LocationTaken(UsageError):
    """There is already another payload at this Location: Objects never change (moqt 15 #3)."""
