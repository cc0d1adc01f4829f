"""The contract of moqt.quic.api, over each implementation and over good and bad networks."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import pytest

from moqt.quic.api import QuicOptions
from tests.quic.contract import Contract
from tests.quic.ends import Ends, loopback_ends, memory_ends, simulated_ends

if TYPE_CHECKING:
    from tests.conftest import Certificates

Options = QuicOptions | None


@pytest.mark.virtual
class TestMemory(Contract):
    def connect(self, client: Options = None, server: Options = None) -> AbstractAsyncContextManager[Ends]:
        return memory_ends(client, server)


@pytest.mark.virtual
class TestMemoryRough(Contract):
    exact = False

    def connect(self, client: Options = None, server: Options = None) -> AbstractAsyncContextManager[Ends]:
        return memory_ends(client, server, jitter=0.02, loss=0.05, ragged=True)


class AioquicContract(Contract):
    @pytest.fixture(autouse=True)
    def take_certificates(self, certificates: Certificates) -> None:
        self.certificates = certificates


@pytest.mark.virtual
class TestAioquicSimulated(AioquicContract):
    def connect(self, client: Options = None, server: Options = None) -> AbstractAsyncContextManager[Ends]:
        return simulated_ends(self.certificates, client, server)


@pytest.mark.virtual
class TestAioquicRough(AioquicContract):
    """Of 100 datagrams 3 are lost, 2 come twice, and many overtake others."""

    exact = False

    def connect(self, client: Options = None, server: Options = None) -> AbstractAsyncContextManager[Ends]:
        return simulated_ends(self.certificates, client, server, jitter=0.003, loss=0.03, repeat=0.02)


class TestAioquicLoopback(AioquicContract):
    # The kernel may drop datagrams when its buffers are full.
    exact = False

    def connect(self, client: Options = None, server: Options = None) -> AbstractAsyncContextManager[Ends]:
        return loopback_ends(self.certificates, client, server)
