"""A caching relay: `python -m moqt.relay --help`."""

from moqt.relay.relay import Relay

__all__ = ["Relay"]
