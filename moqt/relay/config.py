"""The options of `python -m moqt.relay`: one field each makes the flag, the variable and the key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moqt.console import Connecting
from moqt.options import REQUIRED, option
from moqt.relay.relay import CACHE_BYTES

__all__ = ["PREFIX", "Settings"]

PREFIX: Final = "MOQT_RELAY_"
"""Of the variables of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Connecting):
    """What the relay was told. Sizes are bytes, times are seconds."""

    listen: str = option(REQUIRED, "HOST:PORT", "wait for sessions here", section="sessions")
    cert: Path = option(REQUIRED, "FILE", "the certificate chain, PEM")
    key: Path = option(REQUIRED, "FILE", "its private key, PEM")
    upstream: tuple[str, ...] = option(
        (), "URI", "a relay to ask for what is not here; may be repeated: they are tried in order"
    )
    drain: float = option(
        5.0, "SECONDS", "give sessions so long to take what is in flight when told to go", least=0
    )
    cache_bytes: int = option(CACHE_BYTES, "N", "most bytes of Objects to keep", least=0, section="cache")
    linger: float = option(
        10.0, "SECONDS", "keep an upstream subscription so long when its last subscriber has left", least=0
    )
