"""certs/make.py: its certificates convince the verifiers that matter, and it overwrites nothing unasked."""

from __future__ import annotations

import ipaddress
import ssl
import stat
from pathlib import Path

import pytest
from aioquic.tls import AlertBadCertificate, load_pem_x509_certificates, verify_certificate
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from certs.make import CertificateFiles, main, make


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return make(tmp_path_factory.mktemp("certs"), names=["cache.example.org", "192.0.2.7"])


def verify_as_aioquic(files: CertificateFiles, name: str, *, ca: Path | None = None) -> None:
    """What aioquic does with a server's certificate; raises AlertBadCertificate."""
    verify_certificate(
        certificate=load_pem_x509_certificates(files.certificate.read_bytes())[0],
        chain=[],
        server_name=name,
        cafile=str(ca or files.ca),
    )


def handshake(files: CertificateFiles, name: str, ca: Path) -> None:
    """A TLS 1.3 handshake in memory, OpenSSL on both ends, with the strict checks of Python 3.13."""
    client_context = ssl.create_default_context(cafile=str(ca))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(files.certificate, files.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
    client.do_handshake()  # finished: reports nothing more to read


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", "cache.example.org", "192.0.2.7"])
def test_verifies_for_each_name(files: CertificateFiles, name: str) -> None:
    verify_as_aioquic(files, name)
    handshake(files, name, files.ca)


def test_does_not_verify_for_another_name(files: CertificateFiles) -> None:
    with pytest.raises(AlertBadCertificate):
        verify_as_aioquic(files, "other.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(files, "other.example.org", files.ca)


def test_does_not_verify_under_another_authority(files: CertificateFiles, tmp_path: Path) -> None:
    other = make(tmp_path)
    with pytest.raises(AlertBadCertificate):
        verify_as_aioquic(files, "localhost", ca=other.ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, "localhost", other.ca)


def test_leaf_and_authority_are_each_fit_for_their_use_only(files: CertificateFiles) -> None:
    ca = x509.load_pem_x509_certificate(files.ca.read_bytes()).extensions
    leaf = x509.load_pem_x509_certificate(files.certificate.read_bytes()).extensions
    assert ca.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert ca.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert not leaf.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not leaf.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert leaf.get_extension_for_class(x509.KeyUsage).value.digital_signature
    assert list(leaf.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]
    names = leaf.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "cache.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(address) for address in ("127.0.0.1", "::1", "192.0.2.7")
    ]


def test_only_the_owner_can_read_the_key(files: CertificateFiles) -> None:
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert b"PRIVATE KEY" in files.key.read_bytes()
    assert b"PRIVATE KEY" not in files.ca.read_bytes() + files.certificate.read_bytes()


def test_overwrites_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "new"
    assert main([str(directory)]) == 0
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert sorted(before) == ["ca.pem", "cert.pem", "key.pem"]
    (directory / "ca.pem").unlink()  # one file in the way is enough to refuse, and then nothing is written
    assert main([str(directory)]) == 2
    assert "--force" in capsys.readouterr().err
    assert {path.name for path in directory.iterdir()} == {"cert.pem", "key.pem"}
    assert (directory / "key.pem").read_bytes() == before["key.pem"]
    assert main([str(directory), "--force"]) == 0
    after = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert stat.S_IMODE((directory / "key.pem").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "arguments", [["--name", "no spaces"], ["--name", "a..b"], ["--name", "müller.example"], ["--days", "0"]]
)
def test_refuses_what_makes_no_certificate(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), *arguments]) == 2
    assert arguments[1] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
