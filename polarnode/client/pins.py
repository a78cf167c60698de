"""Certificates that are pinned: `https://HOST:PORT#SHA256` is the server that shows this one certificate.

Who serves with a certificate of his own needs no authority that signs it: its digest travels with the
address. Invariant: a certificate is compared within the handshake, before a byte of a request is sent. Its
names and its dates say nothing then, so no clock and no name server needs to be right.
"""

import re
import ssl
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

from polarnode.client.values import Unreachable
from polarnode.core.codec.limits import address
from polarnode.core.errors import ConfigError

PIN_SEPARATOR: Final = (
    "#"  # between an address and the SHA-256 of its certificate; no server is sent what follows
)
DIGEST: Final = re.compile(r"[0-9a-f]{64}")


# what OpenSSL says where a server answers a handshake in plain HTTP: its versions 1.1, 3.0 and later
PLAIN_HTTP_REASONS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


class AnotherCertificate(ssl.SSLCertVerificationError):
    """A server that shows another certificate than the one that was pinned."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that led to it, the deepest last."""
    yield error
    for each in getattr(error, "exceptions", ()):
        yield from causes(each)
    before = error.__cause__ or error.__context__
    if before is not None:
        yield from causes(before)


def reason_of(error: BaseException) -> str:
    """What an error of a connection came from, in words: libraries raise their own, which may say nothing."""
    found = [str(each) for each in causes(error) if str(each)]
    return found[-1] if found else type(error).__name__


def other_certificate(error: BaseException) -> ConfigError | None:
    """The error for a caller, where `error` came of another certificate than the pinned one: waiting does not
    help then. None for all others.
    """
    for each in causes(error):
        if isinstance(each, AnotherCertificate):
            return ConfigError(str(each.args[-1]))
    return None


def silence(url: str, error: BaseException, why: str) -> Unreachable:
    """The error for an address that does not answer."""
    if any(isinstance(each, ssl.SSLError) and each.reason in PLAIN_HTTP_REASONS for each in causes(error)):
        return Unreachable(f"{url} speaks plain HTTP: use http://{url.partition('://')[2]}")
    return Unreachable(f"{url} does not answer ({why}): is the node running?")


def split_pin(text: str) -> tuple[str, str]:
    """An address and the digest behind it, in lower case; "" without one. Raises ConfigError for what is no
    digest, and for one behind an address that is not https.
    """
    url, mark, digest = text.strip().partition(PIN_SEPARATOR)
    digest = digest.lower().replace(":", "")
    if not mark:
        return url, ""
    if not DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{url}: what follows # must be the SHA-256 of its certificate, 64 hexadecimal digits, not"
            f" {len(digest)} characters: copy the whole address"
        )
    if address(url).scheme != "https":
        raise ConfigError(f"{url}: only an https address shows a certificate: drop what follows #")
    return url, digest


def node_address(text: str) -> tuple[str, str]:
    """`split_pin` of the address that a caller gave for a node. Raises ConfigError where it names neither
    http nor https too: a library would then ask port 80 of this machine, or nobody.
    """
    url, digest = split_pin(text)
    if address(url).scheme not in ("http", "https"):
        meant = url.rpartition("://")[2]
        raise ConfigError(
            f"{url} is no node's address: write http://{meant}, or https:// where it serves TLS"
        )
    return url, digest


def trust(url: str, digest: str = "") -> ssl.SSLContext | None:
    """What connections to `url` are verified with: its pinned certificate alone, or the machine's
    authorities. None for plain HTTP.
    """
    if address(url).scheme != "https":
        return None
    return pinned_context(url, digest) if digest else ssl.create_default_context()


def pinned_context(url: str, digest: str) -> ssl.SSLContext:
    """A context for clients whose handshakes fail with AnotherCertificate unless the certificate has this
    digest, also where its names and dates would do.
    """

    def compare(shown: bytes | None) -> None:
        if shown is None or sha256(shown).hexdigest() != digest:
            raise AnotherCertificate(
                f"{url} shows another certificate than the one that was pinned: it was renewed, or somebody"
                " stands between; give the address with the digest of today"
            )

    class PinnedSocket(ssl.SSLSocket):
        """What http.client and others that block speak through."""

        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            compare(self.getpeercert(binary_form=True))

    class PinnedObject(ssl.SSLObject):
        """What Trio and asyncio speak through."""

        def do_handshake(self) -> None:
            super().do_handshake()
            compare(self.getpeercert(binary_form=True))

    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the certificate itself is known
    context.verify_mode = ssl.CERT_NONE
    context.sslsocket_class, context.sslobject_class = PinnedSocket, PinnedObject
    found: ssl.SSLContext = context
    return found
