"""What a peer says in CRYPTO frames once the handshake is confirmed, and its buffers are gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription, Epoch

from moqt.quic.connection import AioquicConnection
from tests.quic.ends import simulated_ends

if TYPE_CHECKING:
    from tests.conftest import Certificates

pytestmark = pytest.mark.virtual

UNEXPECTED = QuicErrorCode.CRYPTO_ERROR + AlertDescription.unexpected_message
MALFORMED = QuicErrorCode.CRYPTO_ERROR + AlertDescription.decode_error
KEY_UPDATE = bytes((24, 0, 0, 1, 0))
FINISHED = bytes((20, 0, 0, 32)) + bytes(32)
BAD_TICKET = bytes((4, 0, 0, 3, 0, 0, 0))
TICKET = bytes((4, 0, 0, 13)) + bytes(13)


@pytest.mark.parametrize(
    ("from_client", "message", "code"),
    [
        (True, KEY_UPDATE, UNEXPECTED),
        (True, FINISHED, UNEXPECTED),
        (True, TICKET, UNEXPECTED),
        (False, KEY_UPDATE, UNEXPECTED),
        (False, FINISHED, UNEXPECTED),
        (False, BAD_TICKET, MALFORMED),
        (False, TICKET, None),
    ],
)
async def test_crypto_after_the_handshake(
    certificates: Certificates, from_client: bool, message: bytes, code: int | None
) -> None:
    async with simulated_ends(certificates) as ends:
        await ends.client.ping()
        await ends.server.ping()
        sender, other = (ends.client, ends.server) if from_client else (ends.server, ends.client)
        assert isinstance(sender, AioquicConnection)
        assert isinstance(other, AioquicConnection)
        assert not sender.engine._crypto_buffers
        assert not other.engine._crypto_buffers
        sender.engine._crypto_streams[Epoch.ONE_RTT].sender.write(message)
        sender.kick()
        await asyncio.sleep(1)
        assert (other.closed.code if other.closed is not None else None) == code
