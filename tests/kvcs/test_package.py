"""What `import kvcs` offers, and what it costs a publisher."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvcs


@pytest.mark.parametrize("name", kvcs.__all__)
def test_every_name_that_is_offered_is_there(name: str) -> None:
    assert getattr(kvcs, name).__name__ == name


def test_what_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Relay'"):
        _ = kvcs.Relay  # type: ignore[attr-defined]  # that is what is tested


def test_a_publisher_does_not_import_the_consumer() -> None:
    code = (
        "import sys; from kvcs import Publisher; assert 'kvcs.subscriber' not in sys.modules; "
        "from kvcs import Subscriber; assert 'kvcs.subscriber' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
