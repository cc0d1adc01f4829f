"""The relay's command in this process, so that a test sees both of its sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from moqt.console import Console
from moqt.relay.__main__ import relay
from moqt.relay.config import Settings

if TYPE_CHECKING:
    from tests.conftest import Certificates

__all__ = ["Running", "running_relay"]


class Running(Console):
    """A relay that runs. `events` are what it has told."""

    def __init__(self) -> None:
        super().__init__(as_json=True)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._told = asyncio.Event()

    def tell(self, event: str, text: str, **details: object) -> None:
        self.events.append((event, details))
        self._told.set()

    async def until(self, event: str) -> dict[str, Any]:
        """What it tells with this event, once it does."""
        async with asyncio.timeout(10):
            while event not in dict(self.events):
                self._told.clear()
                await self._told.wait()
        return dict(self.events)[event]

    @property
    def uri(self) -> str:
        """Where it listens."""
        return f"moqt://localhost:{dict(self.events)['listening']['port']}"


@asynccontextmanager
async def running_relay(certificates: Certificates, **options: Any) -> AsyncIterator[Running]:
    """A relay with these settings on a free port of localhost."""
    settings = Settings(
        **{"listen": "localhost:0", "cert": certificates.chain, "key": certificates.key, **options}
    )
    console = Running()
    task = asyncio.create_task(relay(settings, console))
    try:
        listening = asyncio.ensure_future(console.until("listening"))
        await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            listening.cancel()
            task.result()
        yield console
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
