"""Control messages out of a stream, as its bytes arrive, with what may stand where (moqt 3.1, 4.1)."""

from __future__ import annotations

from typing import Final

from moqt.errors import ProtocolError, SessionCode
from moqt.wire.messages import (
    MESSAGES,
    REQUESTS,
    SCOPES,
    Context,
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
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
    decode_body,
)
from moqt.wire.profile import DRAFT_22, Profile, Scope
from moqt.wire.vi64 import Octets, read_vi64

# What may follow a request, to its sender and to its receiver (moqt 4.1). GOAWAY always may (moqt 16).
_TO_REQUESTER: Final[dict[type[Request], tuple[type[Message], ...]]] = {
    Subscribe: (SubscribeOk, RequestError, RequestOk, PublishStateNotify, PublishDone),
    Publish: (RequestOk, RequestError, RequestUpdate),
    Fetch: (FetchOk, RequestError, RequestOk),
    TrackStatus: (RequestOk, RequestError),
    PublishNamespace: (RequestOk, RequestError),
    SubscribeNamespace: (RequestOk, RequestError, Namespace, NamespaceDone),
    SubscribeTracks: (RequestOk, RequestError, PublishSkipped),
}
_TO_RESPONDER: Final[dict[type[Request], tuple[type[Message], ...]]] = {
    Subscribe: (RequestUpdate,),
    Publish: (RequestUpdate, RequestOk, RequestError, PublishStateNotify, PublishDone),
    Fetch: (RequestUpdate,),
    TrackStatus: (),
    PublishNamespace: (RequestUpdate,),
    SubscribeNamespace: (RequestUpdate,),
    SubscribeTracks: (RequestUpdate,),
}
_UPDATE_SCOPES: Final[dict[type[Request], Scope]] = {
    Subscribe: Scope.UPDATE_SUBSCRIPTION,
    Publish: Scope.UPDATE_SUBSCRIPTION,
    Fetch: Scope.UPDATE_FETCH,
    PublishNamespace: Scope.UPDATE_PUBLISH_NAMESPACE,
    SubscribeNamespace: Scope.UPDATE_SUBSCRIBE_NAMESPACE,
    SubscribeTracks: Scope.UPDATE_SUBSCRIBE_TRACKS,
}
# The REQUEST_OK that is the reply to a request; a SUBSCRIBE and a FETCH have a reply of their own.
_REPLY_SCOPES: Final[dict[type[Request], Scope]] = {
    Publish: Scope.PUBLISH_OK,
    TrackStatus: Scope.TRACK_STATUS_OK,
    PublishNamespace: Scope.NAMESPACE_OK,
    SubscribeNamespace: Scope.NAMESPACE_OK,
    SubscribeTracks: Scope.NAMESPACE_OK,
}


class MessageDecoder:
    """Incremental decoder of one direction of one control or request stream.

    `control`: a control stream, SETUP first and then only GOAWAY. Otherwise a request stream: `request` is
    the request that we sent on it; None for a stream that the peer opened, whose first message must be a
    request and sets it. After a ProtocolError the decoder is of no more use.
    """

    def __init__(
        self, *, profile: Profile = DRAFT_22, control: bool = False, request: type[Request] | None = None
    ) -> None:
        self._profile = profile
        self._control = control
        self._sent = request is not None
        self._replied = False
        self._first = True
        self._going_away = False
        self._buffer = bytearray()
        self.request = request

    def feed(self, data: Octets) -> list[Message]:
        """The messages that `data` completes. Raises ProtocolError as soon as it is certain."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while (found := read_vi64(buffer, start)) is not None:
            number, offset = found
            message_type = self._message_type(number)
            body = offset + 2
            end = body + int.from_bytes(buffer[offset:body])
            if body > len(buffer) or end > len(buffer):
                break
            context = Context(self._profile, self._scope(message_type), self.request)
            messages.append(decode_body(message_type, bytes(buffer[body:end]), context))
            self._note(message_type)
            start = end
        del buffer[:start]
        return messages

    def finish(self) -> None:
        """The stream has ended (FIN). Raises ProtocolError inside a message (moqt 25 #14)."""
        if self._buffer:
            raise _violation("the stream ended inside a message")

    def _message_type(self, number: int) -> type[Message]:
        """The type of the next message, if it may stand here (moqt 20 #1, #3, #4, #17, #20)."""
        message_type = MESSAGES.get(number)
        if message_type is None:
            raise _violation(f"unknown message type 0x{number:x}")
        name = message_type.__name__
        if self._control:
            if message_type is not (Setup if self._first else Goaway):
                raise _violation(f"{name} on a control stream, where SETUP comes first and then only GOAWAY")
        elif self.request is None:
            if message_type not in REQUESTS:
                raise _violation(f"a request stream starts with {name}")
        elif message_type is not Goaway:
            table = _TO_REQUESTER if self._sent else _TO_RESPONDER
            if message_type not in table[self.request]:
                raise _violation(f"{name} on the stream of a {self.request.__name__}")
            if (
                self._sent
                and not self._replied
                and self.request in (SubscribeNamespace, SubscribeTracks)
                and message_type not in (RequestOk, RequestError)
            ):
                raise _violation(f"{name} before the reply to {self.request.__name__}")
        if message_type is Goaway and self._going_away:
            raise _violation("a second GOAWAY on one stream")  # moqt 20 #13
        return message_type

    def _scope(self, message_type: type[Message]) -> Scope | None:
        """Where the parameters of the next message stand (moqt 5.2)."""
        if self.request is None:
            return SCOPES.get(message_type)
        if message_type is RequestUpdate:
            return _UPDATE_SCOPES[self.request]
        if message_type is RequestOk:
            reply = self._sent and not self._replied
            return _REPLY_SCOPES.get(self.request, Scope.UPDATE_OK) if reply else Scope.UPDATE_OK
        return SCOPES.get(message_type)

    def _note(self, message_type: type[Message]) -> None:
        self._first = False
        if message_type is Goaway:
            self._going_away = True
        elif not self._control and self.request is None:
            [self.request] = [request for request in REQUESTS if request is message_type]
        elif message_type in (RequestOk, RequestError, SubscribeOk, FetchOk):
            self._replied = True


def _violation(reason: str) -> ProtocolError:
    return ProtocolError(SessionCode.PROTOCOL_VIOLATION, reason)
