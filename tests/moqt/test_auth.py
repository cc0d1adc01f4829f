"""Tokens and their aliases (moqt 2.7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.auth import TokenCache
from moqt.errors import ProtocolError, RequestCode, RequestRefused, SessionCode
from moqt.wire import AliasType, Token


def register(alias: int, value: bytes, kind: int = 0) -> Token:
    return Token(AliasType.REGISTER, alias, kind, value)


def use(alias: int) -> Token:
    return Token(AliasType.USE_ALIAS, alias)


def delete(alias: int) -> Token:
    return Token(AliasType.DELETE, alias)


def value(value: bytes, kind: int = 0) -> Token:
    return Token(AliasType.USE_VALUE, None, kind, value)


def test_a_value_is_used_once() -> None:
    cache = TokenCache(0)
    assert cache.resolve([value(b"a"), value(b"a", 5), value(b"")]) == [(0, b"a"), (5, b"a"), (0, b"")]
    assert cache.resolve([]) == []


def test_registered_used_and_deleted() -> None:
    cache = TokenCache(100)
    assert cache.resolve([register(7, b"secret", 3)]) == [(3, b"secret")]
    assert cache.resolve([use(7)]) == [(3, b"secret")]
    assert cache.resolve([use(7), delete(7)]) == [(3, b"secret")]
    with pytest.raises(RequestRefused) as caught:
        cache.resolve([use(7)])
    assert caught.value.code == RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS
    assert cache.resolve([register(7, b"other")]) == [(0, b"other")]


def test_the_order_in_one_message_counts() -> None:
    cache = TokenCache(100)
    assert cache.resolve([register(1, b"a"), delete(1), register(1, b"b")]) == [(0, b"a"), (0, b"b")]
    assert cache.resolve([use(1)]) == [(0, b"b")]
    with pytest.raises(RequestRefused):
        cache.resolve([delete(1), use(1)])


def test_a_register_takes_effect_in_a_message_that_is_rejected() -> None:
    cache = TokenCache(100)
    with pytest.raises(RequestRefused):
        cache.resolve([use(9), register(1, b"a")])
    assert cache.resolve([use(1)]) == [(0, b"a")]


def test_an_alias_in_use() -> None:
    cache = TokenCache(100)
    cache.resolve([register(1, b"a")])
    with pytest.raises(ProtocolError) as caught:
        cache.resolve([register(1, b"a")])
    assert caught.value.code == SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS


def test_overflow() -> None:
    """Σ (16 + length) may be the limit, and no more; what is deleted makes room."""
    cache = TokenCache(50)
    cache.resolve([register(1, bytes(9)), register(2, bytes(9), 1)])
    with pytest.raises(ProtocolError) as caught:
        cache.resolve([register(3, b"")])
    assert caught.value.code == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
    cache.resolve([delete(1)])
    cache.resolve([register(3, bytes(9))])
    with pytest.raises(ProtocolError):
        cache.resolve([register(4, b"")])


@pytest.mark.parametrize("tokens", [[value(b"a")] * 2, [register(1, b"a"), value(b"a")]])
def test_the_same_token_twice_in_one_message(tokens: list[Token]) -> None:
    """Repeatable only if type and value differ after resolving."""
    with pytest.raises(ProtocolError) as caught:
        TokenCache(100).resolve(tokens)
    assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


def test_an_alias_and_its_value() -> None:
    cache = TokenCache(100)
    cache.resolve([register(1, b"a")])
    with pytest.raises(ProtocolError):
        cache.resolve([use(1), value(b"a")])
    assert cache.resolve([use(1), value(b"a", 1)]) == [(0, b"a"), (1, b"a")]


@pytest.mark.parametrize("token", [use(1), delete(1)])
def test_aliases_in_the_setup_of_a_client(token: Token) -> None:
    with pytest.raises(ProtocolError) as caught:
        TokenCache(100).resolve([register(1, b"a"), token], setup_at_server=True)
    assert caught.value.code == SessionCode.PROTOCOL_VIOLATION
    TokenCache(100).resolve([register(1, b"a")], setup_at_server=True)


def test_aliases_in_the_setup_of_a_server() -> None:
    cache = TokenCache(100)
    assert cache.resolve([register(1, b"a"), delete(1)], setup_at_server=False) == [(0, b"a")]
    with pytest.raises(RequestRefused):
        cache.resolve([use(1)], setup_at_server=False)


def test_a_register_in_setup_that_does_not_fit_is_used_once() -> None:
    cache = TokenCache(20)
    found = cache.resolve([register(1, b"a"), register(2, b"b")], setup_at_server=True)
    assert found == [(0, b"a"), (0, b"b")]
    assert cache.resolve([use(1)]) == [(0, b"a")]
    with pytest.raises(RequestRefused):
        cache.resolve([use(2)])


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["register", "use", "delete"]), st.integers(0, 3), st.binary(max_size=9))
    )
)
def test_against_a_dictionary(steps: list[tuple[str, int, bytes]]) -> None:
    cache, known = TokenCache(60), dict[int, bytes]()
    for step, alias, content in steps:
        size = sum(16 + len(one) for one in known.values())
        if step == "register":
            if alias in known or size + 16 + len(content) > 60:
                with pytest.raises(ProtocolError):
                    cache.resolve([register(alias, content)])
            else:
                known[alias] = content
                cache.resolve([register(alias, content)])
        elif alias not in known:
            with pytest.raises(RequestRefused):
                cache.resolve([use(alias) if step == "use" else delete(alias)])
        elif step == "use":
            assert cache.resolve([use(alias)]) == [(0, known[alias])]
        else:
            del known[alias]
            assert cache.resolve([delete(alias)]) == []
