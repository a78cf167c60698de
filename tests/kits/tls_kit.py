"""Certificates of an authority that exists for one test, as PEM files."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from attrs import define, field
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@define(eq=False)
class CertificateAuthority:
    """A certificate authority; `pem` is the file that clients trust."""

    folder: Path
    _key: ec.EllipticCurvePrivateKey = field(factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def pem(self) -> Path:
        return self.folder / "authority.pem"

    def __attrs_post_init__(self) -> None:
        now = datetime.now(UTC)
        made = self._builder("an authority of tests", now, now + timedelta(days=9)).public_key(
            self._key.public_key()
        )
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = made.add_extension(usage, critical=True)
        made = made.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        self.pem.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self, *names: str, days: float = 5, passphrase: str = "", label: str = "tls"
    ) -> tuple[str, str]:
        """The files of a certificate for these names and addresses, and of its key, valid for so many days;
        written over those of the same label.
        """
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        made = self._builder(names[0], now - timedelta(days=6), now + timedelta(days=days))
        made = made.public_key(key.public_key())
        made = made.add_extension(
            x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False
        )
        made = made.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        chain, private = self.folder / f"{label}.crt", self.folder / f"{label}.key"
        chain.write_bytes(made.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
        return str(chain), str(private)

    def _builder(self, name: str, since: datetime, until: datetime) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().issuer_name(_named("an authority of tests"))
        made = made.subject_name(_named(name)).serial_number(x509.random_serial_number())
        return made.not_valid_before(since).not_valid_after(until)
