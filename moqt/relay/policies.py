"""The policy of `--policy`: a TOML file that names what makes the policy, so that a relay need not know whose
namespaces it guards.
"""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

from moqt.authorization import Policy
from moqt.errors import UsageError

__all__ = ["load_policy"]


def load_policy(file: Path) -> Policy:
    """Read `file`. Its key "load" is MODULE:FUNCTION; the function gets all other keys as a mapping, and
    returns the policy. Raises UsageError, as the function may.
    """
    try:
        options = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--policy {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--policy {file} is not TOML: {error}") from error
    name = options.pop("load", None)
    try:
        policy: Policy = _function(name)(options)
    except UsageError as error:
        raise UsageError(f"--policy {file}: {error}") from error
    return policy


def _function(name: object) -> Any:
    module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module or not function:
        raise UsageError('"load" must name what makes the policy, such as "kvcs.policy:from_config"')
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f'"load" names {name}, which is not there: {error}') from error
