"""What the relay's command makes of flags, environment and file before it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moqt.errors import UsageError
from moqt.relay.__main__ import main, parser
from moqt.relay.config import PREFIX, Settings
from tests.relay.running import running_relay

if TYPE_CHECKING:
    from tests.conftest import Certificates

NEEDED = ["--listen", "localhost:0", "--cert", "c.pem", "--key", "k.pem"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


class Command:
    """Runs `python -m moqt.relay` as far as its errors of usage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def fails(self, *arguments: str, **environment: str) -> str:
        """What it prints on standard error; the exit code is that of bad usage."""
        for name, value in environment.items():
            self._monkeypatch.setenv(PREFIX + name, value)
        self._monkeypatch.setattr("sys.argv", ["moqt/relay/__main__.py", *NEEDED, *arguments])
        assert main() == 2
        out, err = self._capsys.readouterr()
        if "--json" in arguments:
            assert json.loads(out)["event"] == "error"
        assert err.count("\n") == 1
        return err


def test_an_unknown_key(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text("cache-byte = 1\n")
    expected = f'relay: {file}: no option "cache-byte": did you mean cache-bytes?\n'
    assert command.fails("--config", str(file)) == expected
    assert command.fails("--config", str(file), "--json") == expected.removeprefix("relay: ")


def test_an_unknown_variable(command: Command) -> None:
    assert "MOQT_RELAY_CACHEBYTES" in command.fails(CACHEBYTES="1")


def test_a_wrong_value(command: Command) -> None:
    assert "MOQT_RELAY_LINGER: expected a number of at least 0" in command.fails(LINGER="long")


def test_an_address_to_listen_on_that_is_none(command: Command) -> None:
    """What said it is named, not another place."""
    says = "expected HOST:PORT, such as localhost:4433 or [::1]:4433, not"
    assert f'MOQT_RELAY_LISTEN: {says} "4433"' in command.fails(LISTEN="4433")
    assert f'--listen: {says} "x"' in command.fails("--listen", "x", LISTEN="localhost:0")


def test_help_teaches_every_option() -> None:
    text = parser().format_help()
    for name in Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
    assert "MOQT_RELAY_CACHE_BYTES" in text
    assert "exit codes:" in text


async def test_without_prometheus(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing that needs it says so; nothing else does."""
    monkeypatch.setitem(sys.modules, "moqt.relay.metrics", None)
    async with running_relay(certificates):
        pass
    with pytest.raises(UsageError, match="needs prometheus_client: pip install"):
        async with running_relay(certificates, metrics_port=0):
            pass
