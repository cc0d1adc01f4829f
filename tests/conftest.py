"""What every test may ask for: the virtual clock, certificates, and a check that nothing is left running.

- `@pytest.mark.virtual` on a test or a class, or as `pytestmark` of a module, runs them on `VirtualLoop`.
- `certificates` is a CA and a server certificate for localhost, 127.0.0.1 and ::1.
- After each async test no task may be left; a test that leaves one fails.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import ipaddress
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moqt.quic.virtual import VirtualLoop


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual: async tests run on moqt.quic.virtual.VirtualLoop")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in the background jobs of a shell script, and so it would be in the processes of the tests.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual"):
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture
async def tasks_left() -> AsyncIterator[None]:
    """Fails the test that leaves a task behind. Tasks that were just cancelled get a few turns to end."""
    before = asyncio.all_tasks()
    yield
    for _ in range(10):
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0)
    pytest.fail(f"tasks left behind: {sorted(map(repr, left))}")


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> None:
    """Put `tasks_left` around every async test."""
    function = getattr(request, "function", None)
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if inspect.iscoroutinefunction(inner):
        request.getfixturevalue("tasks_left")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files. `chain` and `key` are the server's, signed by `ca`, and so is the expired pair; `other_ca`
    signed nothing.
    """

    ca: Path
    chain: Path
    key: Path
    other_ca: Path
    expired_chain: Path
    expired_key: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A CA and a server certificate for localhost, 127.0.0.1 and ::1."""
    directory = tmp_path_factory.mktemp("certificates")
    ca, ca_key = _make_certificate("test CA", None, days=30)
    other_ca, _ = _make_certificate("another CA", None, days=30)
    leaf, key = _make_certificate("localhost", (ca, ca_key), days=30)
    expired, expired_key = _make_certificate("localhost", (ca, ca_key), days=-1)
    return Certificates(
        ca=_write(directory / "ca.pem", ca),
        chain=_write(directory / "server.pem", leaf),
        key=_write(directory / "server.key", key),
        other_ca=_write(directory / "other-ca.pem", other_ca),
        expired_chain=_write(directory / "expired.pem", expired),
        expired_key=_write(directory / "expired.key", expired_key),
    )


def _make_certificate(
    name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None, *, days: int
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate that is valid until `days` from now; a CA if it has no issuer."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=60))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if issuer:
        addresses = (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))
        names = [x509.DNSName("localhost"), *map(x509.IPAddress, addresses)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    return builder.sign(issuer[1] if issuer else key, hashes.SHA256()), key


def _write(path: Path, thing: x509.Certificate | ec.EllipticCurvePrivateKey) -> Path:
    if isinstance(thing, x509.Certificate):
        path.write_bytes(thing.public_bytes(serialization.Encoding.PEM))
    else:
        path.write_bytes(
            thing.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        path.chmod(0o600)
    return path
