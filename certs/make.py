"""Makes a development certificate authority and a server certificate: `python certs/make.py [DIR]`.

Every QUIC connection is encrypted with TLS 1.3, so a publisher or relay needs a certificate and a
subscriber needs the authority (CA) to check it with, on one machine too. This script makes both, for
development and tests:

    ca.pem      the authority's certificate; a client's `--ca` file
    cert.pem    the server's certificate, signed by that authority; a server's `--cert` file
    key.pem     the server's private key, readable by its owner alone (mode 0600); a server's `--key` file

The authority's own private key is thrown away once it has signed: nobody can make further certificates
that those who trust ca.pem would accept. A server that others reach over the internet wants a
certificate of a public authority instead.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DEFAULT_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS = 365
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the three files are."""

    ca: Path
    certificate: Path
    key: Path


def files_in(directory: Path) -> CertificateFiles:
    """The names of the three files in `directory`, whether they exist or not."""
    return CertificateFiles(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")


def make(
    directory: Path, *, names: Sequence[str] = (), days: int = DEFAULT_DAYS, force: bool = False
) -> CertificateFiles:
    """Makes ca.pem, cert.pem and key.pem in `directory`, which is created where it is missing.

    The server certificate is good for localhost, 127.0.0.1, ::1 and `names` (host names, or IP addresses
    as text), for `days` days from now.

    Raises FileExistsError where one of the files exists and `force` is false (nothing is written then),
    ValueError for a name that can stand in no certificate or for `days` below 1.
    """
    if days < 1:
        raise ValueError(f"a certificate has to last 1 day at least, not {days}")
    alternatives = [_general_name(name) for name in dict.fromkeys((*DEFAULT_NAMES, *names))]
    files = files_in(directory)
    paths = (files.ca, files.certificate, files.key)
    taken = [path for path in paths if path.exists() or path.is_symlink()]
    if taken and not force:
        raise FileExistsError(f"there already: {', '.join(map(str, taken))}")

    ca_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key, days)
    certificate = _server_certificate(ca, ca_key, server_key.public_key(), alternatives, days)

    directory.mkdir(parents=True, exist_ok=True)
    for path in taken:
        path.unlink()
    _write(files.ca, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    pem_key = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(files.key, pem_key, 0o600)
    return files


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """A self-signed authority, which may sign server certificates and no further authorities."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcs development CA")])
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(key_id, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False)
        .sign(key, hashes.SHA256())
    )


def _server_certificate(
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    public_key: ec.EllipticCurvePublicKey,
    names: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    ca_key_id = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    authority_key_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_key_id)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcs development server")])
    return (
        _builder(subject, ca.subject, public_key, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(authority_key_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    if len(name) > 253 or not all(
        0 < len(label) <= 63 and label.isascii() and label.replace("-", "").isalnum() for label in labels
    ):
        raise ValueError(f"{name!r} is neither a host name (ASCII; xn--... for others) nor an IP address")
    return x509.DNSName(name)


def _write(path: Path, data: bytes, mode: int) -> None:
    """A new file that has its mode from the first moment; never through a link that stands in the way."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 0, or 2 where it was asked for something it will not do."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        prog="certs/make.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  python certs/make.py
      the three files, beside this script, where git ignores them
  python certs/make.py /etc/kvcs --name cache.example.org --name 192.0.2.7
      for a server that other machines reach by these names
  python -m kvcs.publish CACHE.safetensors --listen localhost:4433 --cert certs/cert.pem --key certs/key.pem
  python -m kvcs.subscribe moqt://localhost:4433 --ca certs/ca.pem ...
      what they are for
""",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=here,
        help="where to write (default: %(default)s)",
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="a further host name or IP address of the server; may be repeated "
        f"(always in: {', '.join(DEFAULT_NAMES)})",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=DEFAULT_DAYS,
        help="how many days both are good for (default: %(default)s)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the files that are there; whoever trusts the old ca.pem then needs the new one",
    )
    options = parser.parse_args(arguments)
    try:
        files = make(options.directory, names=options.name, days=options.days, force=options.force)
    except FileExistsError as error:
        print(f"certs/make.py: {error}. Use them, or replace them with --force.", file=sys.stderr)
        return 2
    except (ValueError, OSError, OverflowError) as error:
        print(f"certs/make.py: {error}", file=sys.stderr)
        return 2
    print(f"authority    {files.ca}\ncertificate  {files.certificate}\nprivate key  {files.key}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
