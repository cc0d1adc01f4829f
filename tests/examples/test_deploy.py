"""What operators copy works: the files of examples/deploy, and what the README says of options."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from moqt.options import REQUIRED, load
from moqt.relay.config import PREFIX, Settings
from moqt.relay.policies import load_policy

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
FIELDS = Settings.__dataclass_fields__


def loaded(file: Path, **environment: str) -> Settings:
    return load(Settings, {"config": str(file)}, environment, PREFIX)


def test_the_configuration_file() -> None:
    made = loaded(DEPLOY / "relay.toml")
    assert made.listen == "[::]:4433"
    assert made.cache_bytes == 8 << 30
    assert (made.metrics_port, made.metrics_host) == (9090, "127.0.0.1")
    assert made.policy is not None


def test_its_limits_are_the_defaults() -> None:
    text = (DEPLOY / "relay.toml").read_text()
    _, _, limits = text.partition("these are the defaults")
    found = tomllib.loads(limits.partition("\n")[2])
    assert len(found) == 3
    for key, value in found.items():
        assert FIELDS[key.replace("-", "_")].default == value


def test_what_it_leaves_out_is_right_too(tmp_path: Path) -> None:
    text = re.sub(r"^# ([a-z-]+ = )", r"\1", (DEPLOY / "relay.toml").read_text(), flags=re.MULTILINE)
    (tmp_path / "relay.toml").write_text(text)
    made = loaded(tmp_path / "relay.toml")
    assert len(made.upstream) == 2
    assert made.token is not None


def test_the_policy(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate().public_key()
    (tmp_path / "fleet.pub").write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    text = (DEPLOY / "policy.toml").read_text()
    (tmp_path / "policy.toml").write_text(text.replace("/etc/moqt-relay", str(tmp_path)))
    load_policy(tmp_path / "policy.toml")


@pytest.mark.parametrize("name", ["moqt-relay.service", "Dockerfile"])
def test_variables_of_the_environment(name: str) -> None:
    """They are options, and go with the file."""
    found = dict(re.findall(rf"{PREFIX}(\w+)=(\S+)", (DEPLOY / name).read_text()))
    assert len(found) == 2
    loaded(DEPLOY / "relay.toml", **{PREFIX + variable: value for variable, value in found.items()})


def test_the_unit_waits_until_the_relay_has_drained() -> None:
    found = re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "moqt-relay.service").read_text())
    assert found is not None
    assert int(found[1]) > loaded(DEPLOY / "relay.toml").drain + 5


def section() -> str:
    _, _, text = (ROOT / "README.md").read_text().partition("## The relay\n")
    return text.partition("\n## ")[0]


def test_the_readme_names_options_that_there_are() -> None:
    flags = set(re.findall(r"--([a-z][a-z-]+)", section()))
    assert len(flags) > 20
    assert {flag for flag in flags if flag.replace("-", "_") not in FIELDS} == {"config"}


def test_the_readme_names_every_limit_and_its_default() -> None:
    rows: dict[str, Any] = dict(re.findall(r"^\| `--([a-z-]+)` \| (\S+) \|", section(), re.MULTILINE))
    for flag, told in rows.items():
        assert str(FIELDS[flag.replace("-", "_")].default) == told, flag
    limits = [name for name in FIELDS if name.startswith("max_") or name.endswith("deadline")]
    assert [name for name in limits if name.replace("_", "-") not in rows] == []
    assert all(FIELDS[name].default is not REQUIRED for name in limits)
