"""What a relay answers when the publishers that it asked have failed (moqt 17.2)."""

from __future__ import annotations

from collections.abc import Iterable

from moqt.errors import DeadlineExceeded, MoqtError, RequestCode, RequestRefused, RequestRejected, meaning

__all__ = ["refusal"]

_PASSED_ON = {
    RequestCode.TIMEOUT,
    RequestCode.NOT_SUPPORTED,
    RequestCode.EXCESSIVE_LOAD,
    RequestCode.DOES_NOT_EXIST,
    RequestCode.INVALID_RANGE,
    RequestCode.MALFORMED_TRACK,
    RequestCode.UNSUPPORTED_EXTENSION,
}
"""What a publisher says of the Track, and not of our request, our rights or itself."""


def refusal(errors: Iterable[MoqtError]) -> RequestRefused | None:
    """The answer after these failures, one for each publisher; None if nobody has failed.

    That the Track does not exist is said only if all said so.
    """
    answer: RequestRefused | None = None
    for error in errors:
        new = _answer(error)
        if answer is None or answer.code == RequestCode.DOES_NOT_EXIST:
            answer = new
    return answer


def _answer(error: MoqtError) -> RequestRefused:
    if isinstance(error, DeadlineExceeded):
        return RequestRefused(RequestCode.TIMEOUT, "the publisher did not answer in time")
    if not isinstance(error, RequestRejected):
        return RequestRefused(RequestCode.INTERNAL_ERROR, "the publisher was lost before it answered")
    code = meaning(RequestCode, error.code)
    if code in _PASSED_ON:
        return RequestRefused(code, error.reason)
    if code is RequestCode.REDIRECT and error.redirect is not None:  # moqt 15 #20: forwarded.
        return RequestRefused(code, error.reason, error.redirect)
    if code is RequestCode.GOING_AWAY:
        return RequestRefused(RequestCode.DOES_NOT_EXIST, "the publisher of the Track is leaving")
    return RequestRefused(RequestCode.INTERNAL_ERROR, "the publisher refused what we asked")
