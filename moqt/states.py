"""Which message may come when on a request stream: the states of a request, and their transitions, as one
table.

Both ends of a request stream follow the table, each for what the other side sends. A message that has no
transition is a PROTOCOL_VIOLATION (moqt 20 #17, #19, #20, #22). The two directions of a stream are not in
step, so what one side sent before it could know that the other has ended the request is no violation.
"""

from __future__ import annotations

from enum import Enum

from moqt.wire import (
    Fetch,
    FetchOk,
    Goaway,
    Message,
    Namespace,
    NamespaceDone,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    Request,
    RequestError,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)

__all__ = ["COMPLETE", "TRANSITIONS", "RequestState", "Sender"]


class RequestState(Enum):
    """States of a request."""

    PENDING = "no reply yet"
    ESTABLISHED = "accepted"
    REJECTED = "rejected"
    DONE = "its last message was sent"

    @property
    def over(self) -> bool:
        """Whether the request has come to its end."""
        return self in (RequestState.REJECTED, RequestState.DONE)


class Sender(Enum):
    """Who sent a message on a request stream."""

    REQUESTER = "requester"
    RESPONDER = "responder"


Step = tuple[type[Request], Sender, RequestState, type[Message]]

_PENDING, _ESTABLISHED = RequestState.PENDING, RequestState.ESTABLISHED
_REJECTED, _DONE = RequestState.REJECTED, RequestState.DONE
_REQUESTER, _RESPONDER = Sender.REQUESTER, Sender.RESPONDER

_REPLY: dict[type[Request], type[Message]] = {
    Subscribe: SubscribeOk,
    Publish: RequestOk,
    Fetch: FetchOk,
    TrackStatus: RequestOk,
    PublishNamespace: RequestOk,
    SubscribeNamespace: RequestOk,
    SubscribeTracks: RequestOk,
}

_PUBLISHER: dict[type[Request], Sender] = {Subscribe: _RESPONDER, Publish: _REQUESTER}
"""Who publishes in a subscription."""


def _running() -> dict[Step, RequestState]:
    """What may be said before the request is over."""
    table: dict[Step, RequestState] = {}
    for request, reply in _REPLY.items():
        # moqt 4.1: one reply; TRACK_STATUS is over with it.
        table[request, _RESPONDER, _PENDING, reply] = _DONE if request is TrackStatus else _ESTABLISHED
        table[request, _RESPONDER, _PENDING, RequestError] = _REJECTED
        for sender in Sender:  # moqt 16: GOAWAY for one request, from either side.
            for state in (_PENDING, _ESTABLISHED):
                table[request, sender, state, Goaway] = state
        if request is TrackStatus:
            continue
        for state in (_PENDING, _ESTABLISHED):  # Updates may be sent before the reply has come.
            table[request, _REQUESTER, state, RequestUpdate] = state
        # Replies to updates; RequestStream counts that each has its update.
        table[request, _RESPONDER, _ESTABLISHED, RequestOk] = _ESTABLISHED
        table[request, _RESPONDER, _ESTABLISHED, RequestError] = _ESTABLISHED
    for request, publisher in _PUBLISHER.items():
        table[request, publisher, _ESTABLISHED, PublishStateNotify] = _ESTABLISHED
        table[request, publisher, _ESTABLISHED, PublishDone] = _DONE
    # The publisher of a PUBLISH need not wait for PUBLISH_OK, and the subscriber may update it (moqt 4.1).
    table[Publish, _REQUESTER, _PENDING, PublishStateNotify] = _PENDING
    table[Publish, _REQUESTER, _PENDING, PublishDone] = _DONE
    table[Publish, _RESPONDER, _ESTABLISHED, RequestUpdate] = _ESTABLISHED
    table[Publish, _REQUESTER, _ESTABLISHED, RequestOk] = _ESTABLISHED
    table[Publish, _REQUESTER, _ESTABLISHED, RequestError] = _ESTABLISHED
    for message in (Namespace, NamespaceDone):
        table[SubscribeNamespace, _RESPONDER, _ESTABLISHED, message] = _ESTABLISHED
    table[SubscribeTracks, _RESPONDER, _ESTABLISHED, PublishSkipped] = _ESTABLISHED
    return table


def _table() -> dict[Step, RequestState]:
    table = _running()
    for (request, sender, before, _), after in list(table.items()):
        if after.over:
            # What the other side may say until then may cross the message that ends the request.
            other = _REQUESTER if sender is _RESPONDER else _RESPONDER
            for known, speaker, state, message in list(table):
                if (known, speaker, state) == (request, other, before):
                    table[request, other, after, message] = after
    return table


TRANSITIONS = _table()
"""(request, sender, state, message) -> state after it; what is missing is a PROTOCOL_VIOLATION."""

COMPLETE: dict[tuple[type[Request], Sender], frozenset[RequestState]] = {
    (request, sender): frozenset(
        {_REJECTED, _DONE}
        if sender is _PUBLISHER.get(request) or (request, sender) == (TrackStatus, _RESPONDER)
        else set(RequestState) - {_PENDING}
        if sender is _RESPONDER
        else set(RequestState)
    )
    for request in _REPLY
    for sender in Sender
}
"""In which states a sender may FIN: when it has sent all that it owes (moqt 3.4)."""
