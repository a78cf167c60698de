"""A self-signed certificate of a server, which is made once. Clients pin it, so that no authority is needed.

Invariant: only its user can read the key's file, from its first byte on, and the key is complete before the
certificate's file exists. An existing pair is never replaced, because others have pinned it.
"""

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from polarnode.core.errors import ConfigError, boundary
from polarnode.support.bounded import open_private

DAYS: Final = 3650  # clients that pin it check no date, and a machine lasts ten years
CLOCK_MARGIN: Final = timedelta(days=1)  # for machines whose clocks are behind


def self_signed(folder: Path, host: str) -> tuple[str, str]:
    """Return the paths of a folder's certificate and key, `tls.crt` and `tls.key`. They are made for `host`
    if they do not exist. Raises ConfigError where they cannot be written.
    """
    chain, key = folder / "tls.crt", folder / "tls.key"
    with boundary(ConfigError, f"a certificate cannot be kept in {folder}"):
        if not (chain.exists() and key.exists()):
            secret = ec.generate_private_key(ec.SECP256R1())
            _keep(key, secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            _keep(chain, _make_certificate(secret, host).public_bytes(Encoding.PEM))
    return str(chain), str(key)


def _keep(path: Path, data: bytes) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.unlink(missing_ok=True)
    with open(part, "wb", opener=open_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _make_certificate(key: ec.EllipticCurvePrivateKey, host: str) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "polarnode")])
    try:
        general: x509.GeneralName = x509.IPAddress(ip_address(host))
    except ValueError:
        general = x509.DNSName(host)
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - CLOCK_MARGIN).not_valid_after(now + timedelta(days=DAYS))
    made = made.add_extension(x509.SubjectAlternativeName([general]), critical=False)
    return made.sign(key, SHA256())
