"""Tokens (moqt 2.7)."""

from __future__ import annotations

import pytest

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.wire import AliasType, Token

VECTORS = {
    "0007": Token(AliasType.DELETE, alias=7),
    "010700736563726574": Token(AliasType.REGISTER, alias=7, type=0, value=b"secret"),
    "0207": Token(AliasType.USE_ALIAS, alias=7),
    "0300746f6b": Token(AliasType.USE_VALUE, type=0, value=b"tok"),
    "038101": Token(AliasType.USE_VALUE, type=257),
}


@pytest.mark.parametrize(("text", "token"), VECTORS.items())
def test_vectors(text: str, token: Token) -> None:
    assert Token.decode(bytes.fromhex(text)) == token
    assert token.encode().hex() == text


@pytest.mark.parametrize("text", ["", "00", "01", "0107", "02", "03", "000700", "020700", "04", "09", "80"])
def test_undecodable_closes_with_its_own_code(text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Token.decode(bytes.fromhex(text))
    assert caught.value.code is SessionCode.KEY_VALUE_FORMATTING_ERROR


def test_repr_hides_the_value() -> None:
    token = Token(AliasType.USE_VALUE, type=1, value=b"top secret")
    assert "secret" not in repr(token)
    assert "secret" not in str(token)


@pytest.mark.parametrize(
    "arguments",
    [
        {"alias_type": AliasType.DELETE},
        {"alias_type": AliasType.USE_ALIAS, "alias": 1, "type": 0},
        {"alias_type": AliasType.USE_ALIAS, "alias": 1, "value": b"secret"},
        {"alias_type": AliasType.REGISTER, "alias": 1},
        {"alias_type": AliasType.REGISTER, "type": 1},
        {"alias_type": AliasType.USE_VALUE, "alias": 1, "type": 1},
        {"alias_type": AliasType.USE_VALUE, "value": b"secret"},
    ],
)
def test_refuses_fields_that_do_not_belong(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        Token(**arguments)  # type: ignore[arg-type]  # the point is what the types do not catch
    assert "secret" not in str(caught.value)
