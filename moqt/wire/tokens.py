"""The Token inside AUTHORIZATION_TOKEN, a Setup Option and a Message Parameter (moqt 2.7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from moqt.errors import SessionCode, UsageError
from moqt.wire.vi64 import Octets, Reader, encode_vi64


class AliasType(IntEnum):
    """What a Token does with the peer's table of aliases."""

    DELETE = 0
    REGISTER = 1
    USE_ALIAS = 2
    USE_VALUE = 3

    @property
    def has_alias(self) -> bool:
        """Whether a Token Alias follows on the wire."""
        return self is not AliasType.USE_VALUE

    @property
    def has_value(self) -> bool:
        """Whether Token Type and Token Value follow on the wire."""
        return self is AliasType.REGISTER or self is AliasType.USE_VALUE


@dataclass(frozen=True, slots=True)
class Token:
    """One Token; `type` is the Token Type (0: agreed out of band). Its repr never shows the value.

    Raises UsageError when a field is missing, or given, that the alias type does not ask for.
    """

    alias_type: AliasType
    alias: int | None = None
    type: int | None = None
    value: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.alias_type.has_alias != (self.alias is not None):
            raise UsageError(f"an alias belongs to every Token but USE_VALUE: {self!r}")
        if self.alias_type.has_value != (self.type is not None) or (self.value and self.type is None):
            raise UsageError(f"type and value belong to REGISTER and USE_VALUE Tokens: {self!r}")

    def encode(self) -> bytes:
        """The bytes of the parameter or option, without their length."""
        encoded = encode_vi64(self.alias_type)
        if self.alias is not None:
            encoded += encode_vi64(self.alias)
        if self.type is not None:
            encoded += encode_vi64(self.type) + self.value
        return encoded

    @classmethod
    def decode(cls, data: Octets) -> Token:
        """Decode a Token that fills `data`. Raises KEY_VALUE_FORMATTING_ERROR (moqt 20 #10)."""
        reader = Reader(data, what="Token", code=SessionCode.KEY_VALUE_FORMATTING_ERROR)
        number = reader.vi64()
        if number not in tuple(AliasType):
            raise reader.fault(f"unknown Alias Type {number}")
        alias_type = AliasType(number)
        alias = reader.vi64() if alias_type.has_alias else None
        token_type = reader.vi64() if alias_type.has_value else None
        value = reader.rest() if alias_type.has_value else b""
        reader.end()
        return cls(alias_type, alias, token_type, value)
