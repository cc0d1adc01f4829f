"""MOQT URIs (moqt 1)."""

from __future__ import annotations

import pytest

from moqt.errors import ProtocolError, SessionCode, UsageError
from moqt.uri import MoqtUri, Served, parse_authority, parse_path


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("moqt://h", MoqtUri("h", 443, "", "", "h")),
        ("moqt://h/", MoqtUri("h", 443, "/", "", "h")),
        (
            "moqt://relay.example.com:4433/a/b?x=1&y=/?",
            MoqtUri("relay.example.com", 4433, "/a/b", "x=1&y=/?", "relay.example.com:4433"),
        ),
        ("moqt://h?q", MoqtUri("h", 443, "", "q", "h")),
        ("moqt://127.0.0.1:1/", MoqtUri("127.0.0.1", 1, "/", "", "127.0.0.1:1")),
        ("moqt://[::1]:65535/x", MoqtUri("::1", 65535, "/x", "", "[::1]:65535")),
        ("moqt://[2001:db8::1]", MoqtUri("2001:db8::1", 443, "", "", "[2001:db8::1]")),
        ("MoQt://Host/%2F%20", MoqtUri("Host", 443, "/%2F%20", "", "Host")),
        ("moqt://h/p#kv:a-b", MoqtUri("h", 443, "/p", "", "h", "kv:a-b")),
        ("moqt://h/a//b;c=d,e", MoqtUri("h", 443, "/a//b;c=d,e", "", "h")),
        ("moqt://h:/", MoqtUri("h", 443, "/", "", "h:")),
    ],
)
def test_parses(text: str, uri: MoqtUri) -> None:
    assert MoqtUri.parse(text) == uri
    assert MoqtUri.parse(str(uri)) == uri


@pytest.mark.parametrize(
    ("text", "option"),
    [("moqt://h", ""), ("moqt://h/a?b", "/a?b"), ("moqt://h?b", "?b"), ("moqt://h/#t:v", "/")],
)
def test_path_option(text: str, option: str) -> None:
    assert MoqtUri.parse(text).path_option == option


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "write it like moqt://"),
        ("relay.example.com", "write it like moqt://"),
        ("https://h/", "write it like moqt://"),
        ("moqt:/h", "write it like moqt://"),
        ("moqt://", "no host"),
        ("moqt:///path", "no host"),
        ("moqt://:4433/", "no host"),
        ("moqt://me:secret@h/", "leave out everything up to the"),
        ("moqt://::1/", "in brackets"),
        ("moqt://2001:db8::1:4433/", "in brackets"),
        ("moqt://[::1/", "not a host and port"),
        ("moqt://[1:2]/", "not an IPv6 address"),
        ("moqt://[fe80::1%25eth0]/", "not a host and port"),
        ("moqt://[::1]x:3/", "not a host and port"),
        ("moqt://a b/", "not a host and port"),
        ("moqt://bücher.example/", "not a host and port"),
        ("moqt://h:port/", "not a host and port"),
        ("moqt://h:0/", "from 1 to 65535"),
        ("moqt://h:65536/", "from 1 to 65535"),
        ("moqt://h:" + "9" * 5000, "from 1 to 65535"),
        ("moqt://h:٣/", "not a host and port"),
        ("moqt://h/a b", "percent-encode"),
        ("moqt://h/%zz", "percent-encode"),
        ("moqt://h/%2", "percent-encode"),
        ("moqt://h/ü", "percent-encode"),
        ("moqt://h/?\n", "percent-encode"),
        ("moqt://h/#", "leave it out"),
        ("moqt://h/#fragment", "leave it out"),
        ("moqt://h/#Type:value", "leave it out"),
        ("moqt://h/#type:a b", "leave it out"),
    ],
)
def test_refuses_with_advice(text: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        MoqtUri.parse(text)
    assert advice in str(caught.value)
    assert "secret" not in str(caught.value)


def test_control_characters_do_not_reach_the_terminal() -> None:
    with pytest.raises(UsageError) as caught:
        MoqtUri.parse("\x1b[2J://h")
    assert str(caught.value).isprintable()


def test_parts_that_stand_in_setup_options() -> None:
    assert parse_authority("[::1]:9") == ("::1", 9)
    assert parse_path("/a?b?c") == ("/a", "b?c")
    assert parse_path("") == ("", "")
    with pytest.raises(UsageError):
        parse_path("a")
    with pytest.raises(UsageError):
        parse_authority("h/")


@pytest.mark.parametrize(
    ("authority", "path", "code"),
    [
        ("relay.example:4433", "/moq", None),
        ("Relay.Example", "/moq?token=x", None),
        ("[::1]:4433", "/", None),
        ("[::1]", "", None),
        ("relay.example", None, None),
        ("other.example", "/moq", SessionCode.INVALID_AUTHORITY),
        ("relay.example.", "/moq", SessionCode.INVALID_AUTHORITY),
        (None, "/moq", SessionCode.INVALID_AUTHORITY),
        ("relay.example", "/moq/", SessionCode.INVALID_PATH),
        ("relay.example", "/MOQ", SessionCode.INVALID_PATH),
    ],
)
def test_served(authority: str | None, path: str | None, code: SessionCode | None) -> None:
    served = Served(frozenset({"relay.example", "::1"}), frozenset({"/moq", "/"}))
    Served().check(authority, path)
    if code is None:
        served.check(authority, path)
    else:
        with pytest.raises(ProtocolError) as error:
            served.check(authority, path)
        assert error.value.code == code
