"""The certificates of the webhook: an authority of its own, and short-lived serving certificates signed by
it.

The API server trusts the authority (caBundle), so a new serving certificate can be issued at any time with
the authority's key: each replica issues its own, in memory, and nothing has to be written to the API. With
cert-manager, its files are used instead.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SERVING_HOURS = 48.0
_EARLIER = datetime.timedelta(minutes=5)  # the clocks of two machines differ


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def ends(self) -> float:
        """When it expires, in seconds since 1970."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()


def authority(name: str = "lastcall webhook") -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, datetime.timedelta(days=AUTHORITY_DAYS)).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return _pair(builder, key, key)


def serving(ca: Pair, names: Sequence[str], hours: float = SERVING_HOURS) -> Pair:
    """Issue a certificate for a server with these names and addresses."""
    signer = serialization.load_pem_private_key(ca.key, None)
    issuer = x509.load_pem_x509_certificate(ca.certificate)
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != issuer.public_key():
        raise ValueError("the key of the authority does not belong to its certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(names[0], None, datetime.timedelta(hours=hours))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
    )
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())  # type: ignore[arg-type]
    builder = builder.add_extension(authority, critical=False)
    return _pair(builder, key, signer)


def read(certificate: Path, key: Path) -> Pair:
    return Pair(certificate.read_bytes(), key.read_bytes())


def load(context: ssl.SSLContext, pair: Pair) -> None:
    """Load it into a context that may be in use: new connections get it. Through memory, so that the key is
    on no disk."""
    with _in_memory(pair.certificate) as certificate, _in_memory(pair.key) as key:
        context.load_cert_chain(certificate, key)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    handle = os.memfd_create("lastcall")
    try:
        os.write(handle, content)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


def _builder(subject: str, issuer: str | None, life: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder().subject_name(_name(subject)).serial_number(x509.random_serial_number())
    )
    builder = builder.not_valid_before(now - _EARLIER).not_valid_after(now + life)
    return builder if issuer is None else builder.issuer_name(_name(issuer))


def _pair(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Pair:
    certificate = builder.sign(signer, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), private)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # the longest that X.509 allows


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
