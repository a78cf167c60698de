"""Where captures listen, and what is refused before any key crosses a network in the clear."""

from typing import Any

import pytest

from polarnode.core.errors import ConfigError
from polarnode.node.config_sources import read_config

TLS: "dict[str, Any]" = {"capture_tls_cert": "a.crt", "capture_tls_key": "a.key"}
URL = {"capture_url": "https://node.example:8443/captures"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"capture_listen": "10.0.0.7"}, r"10\.0\.0\.7 can be reached from outside.*capture_tls_cert.*proxy"),
        ({"capture_listen": "0.0.0.0", **URL}, "can be reached from outside"),
        ({"capture_listen": "::", **URL}, "can be reached from outside"),
        ({"capture_listen": "0.0.0.0", **TLS}, "set capture_url, such as https://"),
        ({"capture_listen": "node.example", **TLS}, "'node.example' is no address.*10.0.0.7"),
        ({"capture_tls_cert": "a.crt"}, "capture_tls_cert and capture_tls_key.*both, or neither"),
        ({"capture_tls_key": "a.key"}, "both, or neither"),
        ({"capture_url": "http://node.example"}, "must begin with https://"),
        ({"capture_url": "http://127.0.0.1:1", **TLS}, "must begin with https://"),
        ({"capture_url": "https://node.example?key=x"}, "capture_url: .* must end with its path"),
        ({"capture_url": "node.example"}, "capture_url: 'node.example' must be an http or https address"),
        ({"capture_url": "https://user:pw@node.example"}, "without a name or password"),
    ],
)
def test_key_exposing_settings_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(flags=settings)


@pytest.mark.parametrize(
    ("settings", "public"),
    [
        ({}, False),
        ({"capture_listen": "127.0.0.9"}, False),
        ({"capture_listen": "::1", **TLS}, False),
        ({"capture_url": "http://localhost:1"}, False),
        (URL, True),
        ({"capture_listen": "10.0.0.7", **TLS}, True),
        ({"capture_listen": "::", **TLS, **URL}, True),
    ],
)
def test_captures_reachable_elsewhere_are_public(settings: Any, public: bool) -> None:
    assert read_config(flags=settings).captures_public is public
