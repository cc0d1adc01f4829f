"""A decoder in the state in which a given message may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from moqt.names import FullTrackName
from moqt.wire import (
    REQUESTS,
    Fetch,
    FetchOk,
    Goaway,
    Message,
    MessageDecoder,
    Namespace,
    NamespaceDone,
    Publish,
    PublishNamespace,
    PublishSkipped,
    Request,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeTracks,
    TrackStatus,
    encode,
)

Ready: TypeAlias = Callable[[type[Message], type[Request]], MessageDecoder]

TRACK = FullTrackName((b"a",), b"t")
OPENERS: dict[type[Request], Request] = {
    Subscribe: Subscribe(0, TRACK),
    Publish: Publish(0, TRACK, 1),
    Fetch: Fetch(0, TRACK),
    TrackStatus: TrackStatus(0, TRACK),
    PublishNamespace: PublishNamespace(0, (b"a",)),
    SubscribeNamespace: SubscribeNamespace(0, (b"a",)),
    SubscribeTracks: SubscribeTracks(0, (b"a",)),
}
OWN_STREAM: dict[type[Message], type[Request]] = {
    FetchOk: Fetch,
    Namespace: SubscribeNamespace,
    NamespaceDone: SubscribeNamespace,
    PublishSkipped: SubscribeTracks,
}


def ready_for(message: type[Message], request: type[Request]) -> MessageDecoder:
    """`request` is that of the stream, for messages that come on the streams of several requests."""
    if message in (Setup, Goaway):
        decoder = MessageDecoder(control=True)
        if message is Goaway:
            decoder.feed(encode(Setup()))
    elif message in REQUESTS:
        decoder = MessageDecoder()
    elif message is RequestUpdate:
        decoder = MessageDecoder()
        decoder.feed(encode(OPENERS[request]))
    else:
        decoder = MessageDecoder(request=OWN_STREAM.get(message, request))
        if message in (Namespace, NamespaceDone, PublishSkipped):
            decoder.feed(encode(RequestOk()))
    return decoder


@pytest.fixture(scope="session")
def ready() -> Ready:
    return ready_for


@pytest.fixture(scope="session")
def openers() -> dict[type[Request], Request]:
    return OPENERS
