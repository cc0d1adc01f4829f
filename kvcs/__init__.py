"""KV Cache Streaming over MOQT: publish the KV cache of a language model, and receive it layer by layer.

`Publisher` and `Subscriber` are where to start; `moqt.serve` and `moqt.connect` make the sessions they need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcs.errors import (
    FileFault,
    InvalidDescriptor,
    InvalidName,
    InvalidTensor,
    InvalidTokens,
    InvalidValue,
    KvcsError,
    ManifestRejected,
    NotWritten,
    ObjectRejected,
    PeerFault,
)
from kvcs.identity import Descriptor, ScopeKey, block_keys
from kvcs.layout import Order
from kvcs.manifest import Manifest
from kvcs.names import DataTrack, PublicationName
from kvcs.publisher import Publication, Publisher, Segment

if TYPE_CHECKING:
    from kvcs.assembly import Layer, Missing
    from kvcs.discovery import Found, discover, discover_in_scope
    from kvcs.subscriber import CacheIncomplete, NothingFound, Reception, Subscriber

__all__ = [
    "CacheIncomplete",
    "DataTrack",
    "Descriptor",
    "FileFault",
    "Found",
    "InvalidDescriptor",
    "InvalidName",
    "InvalidTensor",
    "InvalidTokens",
    "InvalidValue",
    "KvcsError",
    "Layer",
    "Manifest",
    "ManifestRejected",
    "Missing",
    "NotWritten",
    "NothingFound",
    "ObjectRejected",
    "Order",
    "PeerFault",
    "Publication",
    "PublicationName",
    "Publisher",
    "Reception",
    "ScopeKey",
    "Segment",
    "Subscriber",
    "block_keys",
    "discover",
    "discover_in_scope",
]

_OF_CONSUMERS = {
    "kvcs.assembly": ("Layer", "Missing"),
    "kvcs.discovery": ("Found", "discover", "discover_in_scope"),
    "kvcs.subscriber": ("CacheIncomplete", "NothingFound", "Reception", "Subscriber"),
}


if not TYPE_CHECKING:  # A checker would take any name for one that is here.

    def __getattr__(name: str) -> Any:
        """What only a consumer needs is imported with its first use: a publisher lives beside an engine, and
        does without.
        """
        for module, names in _OF_CONSUMERS.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
