"""What can go wrong with a KV cache, and whose fault it was.

::

    KvcsError
    ├── InvalidValue          the caller (also a ValueError)
    │   ├── InvalidScopeKey       a scope key of the wrong length or form
    │   ├── InvalidTokens         token ids, or extras, that have no Block Keys
    │   ├── InvalidTensor         an array whose shape or dtype does not fit the Compatibility Descriptor
    │   └── FileFault             a file that cannot be read or written as asked
    ├── NotWritten            a file that could be begun, and not be written: the disk is full
    ├── InvalidDescriptor     a Compatibility Descriptor, the caller's or a peer's (also a ValueError)
    ├── InvalidName           a namespace or a track name, the caller's or a peer's (also a ValueError)
    └── PeerFault             what a peer published
        ├── ObjectRejected        an Object that failed a check: treat it as missing (kvcs 4)
        └── ManifestRejected      a manifest that failed a check: discard it (kvcs 5)

What the network and deadlines do is told by the tree of `moqt.errors`.
"""

from __future__ import annotations

from enum import StrEnum


class KvcsError(Exception):
    """Everything that `kvcs` raises on purpose."""


class InvalidValue(KvcsError, ValueError):
    """The caller's fault: a value that cannot be used. The text says what was expected and what came."""


class InvalidScopeKey(InvalidValue):
    """A scope key of the wrong length or form. The text never shows the key."""


class InvalidTokens(InvalidValue):
    """Token ids outside 0..2^32-1, of another shape or type, or extras that do not lie within the tokens."""


class InvalidTensor(InvalidValue):
    """An array whose shape or dtype does not fit the Compatibility Descriptor."""


class FileFault(InvalidValue):
    """A file that cannot be read or written as asked. The text names it and says what to do."""


class NotWritten(KvcsError):
    """A file that could be begun, and not be written: the disk is full. What was there before is still
    there.
    """


class InvalidDescriptor(KvcsError, ValueError):
    """A Compatibility Descriptor that profile kvsp-lp1 does not allow (kvsp 2.1)."""


class InvalidName(KvcsError, ValueError):
    """A namespace of another shape than kvcs 3.1, or a track name outside the syntax of kvcs 3.2."""


class PeerFault(KvcsError):
    """What a peer published cannot be used."""


class Check(StrEnum):
    """The checks of an Object (kvcs 4 and R4b), by what is compared."""

    HEADER = "header size"
    MAGIC = "Magic"
    VERSION = "Version"
    COMPONENT = "Component"
    LAYER = "Layer"
    BLOCK_INDEX = "Block Index"
    TOKEN_START = "Token Start"
    TOKEN_COUNT = "Token Count"
    CODEC = "Codec"
    DATA_LENGTH = "Data Length"
    SECTION_LENGTH = "section length"  # Data of codec raw, against the Compatibility Descriptor
    DATA_DIGEST = "Data Digest"
    LISTED_DIGEST = "Data Digest listed in the manifest"
    ENCODING = "codec data"


class ObjectRejected(PeerFault):
    """An Object that failed `check`: it is discarded and treated as missing (kvcs 4).

    `expected` and `got` are what the check compared: integers, octets or text.
    """

    def __init__(self, check: Check, expected: int | bytes | str, got: int | bytes | str) -> None:
        super().__init__(f"{check}: expected {_shown(expected)}, got {_shown(got)}")
        self.check = check
        self.expected = expected
        self.got = got


class ManifestRejected(PeerFault):
    """A manifest that cannot be used: `where` is the JSON member, as in "segments[1].blocks"."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"manifest: {where}: {reason}" if where else f"manifest: {reason}")
        self.where = where
        self.reason = reason


def _shown(value: int | bytes | str) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
