"""What a machine needs to join a fleet, as one word: `pnj1.` and base64url of JSON.

It names the front's address, the SHA-256 of its certificate and the fleet's token. It is a secret as that
token is: nothing logs it, and no command line has it. Pure; the text is read strictly, because it is copied
by hand.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

from attrs import field, frozen

from polarnode.client.pins import split_pin
from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.limits import address, is_loopback, url_fault
from polarnode.core.errors import ConfigError, Refused

VERSION: Final = "pnj1."  # of the form; another one begins otherwise
LONGEST: Final = 8192  # characters: an address has 2,048 at most, a token a line
WORD: Final = re.compile(r"[A-Za-z0-9_-]+")
SECRET: Final = re.compile(r"[!-~]([ -~]*[!-~])?")  # what a header carries, as of every token
REMEDY: Final = "copy the whole line that `polarnode fleet` printed, or its file join.token"


@frozen(kw_only=True)
class JoinToken:
    """The front's address, the digest of its certificate ("" on loopback alone), and the fleet's token."""

    url: str
    certificate: str
    token: str = field(repr=False)

    @property
    def text(self) -> str:
        """Itself as one word, which `read_join_token` reads."""
        return VERSION + urlsafe_b64encode(dump_json(plain(self))).decode().rstrip("=")


def read_join_token(text: str) -> JoinToken:
    """Read a join token. ConfigError for anything else, without a part of it: it may be a secret."""
    text = text.strip()
    word = text.removeprefix(VERSION)
    if not text.startswith(VERSION):
        raise ConfigError(f"join: a join token begins with {VERSION}, and this text does not: {REMEDY}")
    if len(word) > LONGEST or not WORD.fullmatch(word):
        raise ConfigError(
            f"join: the join token has other characters than letters, digits, - and _: {REMEDY}"
        )
    try:
        found = structure(read_json(urlsafe_b64decode(word + "=" * (-len(word) % 4))), JoinToken)
    except (ValueError, Refused) as error:
        raise ConfigError(f"join: the join token is not whole: {REMEDY}") from error
    host = address(found.url).hostname or ""
    try:
        good = url_fault(found.url) is None and split_pin(f"{found.url}#{found.certificate}")[0] == found.url
    except ConfigError:
        good = found.certificate == "" and url_fault(found.url) is None and is_loopback(host)
    if not good or found.text != text or not SECRET.fullmatch(found.token):
        raise ConfigError(f"join: the join token names no front that can be trusted: {REMEDY}")
    return found
