"""The certificate that a node makes for itself."""

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from polarnode.core.errors import ConfigError
from polarnode.http.self_signed import self_signed


def test_certificate_is_created_once(tmp_path: Path) -> None:
    """Others have pinned it: another host's name does not replace it."""
    chain, key = self_signed(tmp_path, "10.0.0.2")
    before = Path(chain).read_bytes()
    assert self_signed(tmp_path, "node.example") == (chain, key)
    assert Path(chain).read_bytes() == before
    assert stat.S_IMODE(Path(key).stat().st_mode) == 0o600
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(chain, key)


@pytest.mark.parametrize(("host", "kind"), [("10.0.0.2", x509.IPAddress), ("node.example", x509.DNSName)])
def test_certificate_names_its_host(tmp_path: Path, host: str, kind: type[x509.GeneralName]) -> None:
    chain, _ = self_signed(tmp_path, host)
    made = x509.load_pem_x509_certificate(Path(chain).read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(kind)] == [host]  # type: ignore[arg-type]


def test_certificate_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a certificate cannot be kept in"):
        self_signed(tmp_path / "none", "x")
