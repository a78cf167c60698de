"""What may be reached: names and addresses, in every spelling somebody may try."""

import ipaddress
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.containers.egress.rules import (
    EgressRules,
    check_egress,
    egress_rules,
    is_public,
    name_fault,
    pattern_covers,
    spelled,
)
from polarnode.core.errors import ConfigError, Refused
from polarnode.node.config_sources import read_config

RULES = egress_rules(["pypi.example", "*.python.example"], ["10.1.0.0/16", "fd12::/16"])
LABELS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8).map(lambda text: f"a{text}")
NAMES = st.lists(LABELS, min_size=1, max_size=5).map(".".join)


@pytest.mark.parametrize(
    "host",
    [
        "pypi.example",
        "PyPI.Example",
        "pypi.example.",
        "files.python.example",
        "a.b.python.example",
        "xn--bcher-kva.python.example",
    ],
)
def test_listed_names_are_allowed(host: str) -> None:
    assert RULES.refusal(host, 443) is None
    assert RULES.refusal(host, 80) is None


@pytest.mark.parametrize(
    "host",
    [
        "python.example",
        "pypi.example.evil.example",
        "evilpypi.example",
        "evilpython.example",
        "example",
        "sub.pypi.example",
        "localhost",
        "xn--pypi.example",
    ],
)
def test_other_names_are_refused_with_remedy(host: str) -> None:
    assert (
        RULES.refusal(host, 443)
        == f"{host} is not on this task's list (pypi.example, *.python.example): add it to runtime.egress,"
        " where the node's own setting egress allows it"
    )


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "017700000001",
            "0177.0.0.1",
            "1.2.3.4.",
            "127.0.0.0x1",
        ),
        *("::1", "[::1]", "::ffff:127.0.0.1", "fe80::1%eth0"),
        *(
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a b",
            "a/b",
            "a@b",
            "a\0b",
            "pypi.example..",
            "-a.b",
            "a-.b",
            "*.a",
            "%61.b",
            "b\u00fccher.example",
            "pypi\u3002example",
        ),
        *("\u2170.example", "p\u0443pi.example", "a" * 64 + ".b", "a." * 127 + "b"),
    ],
)
def test_invalid_name_is_always_refused(host: str) -> None:
    refusal = EgressRules(names=("*",)).refusal(host, 443)
    assert refusal is not None
    assert "is no host's name: ask by name, not by address" in refusal


@pytest.mark.parametrize("port", [0, 1, 22, 25, 79, 81, 442, 444, 8080, 8443, 65535, 99999])
def test_other_ports_are_refused(port: int) -> None:
    assert (
        RULES.refusal("pypi.example", port)
        == f"port {port} of pypi.example is not reached from here: only ports 80 and 443 are"
    )


def test_long_list_is_shortened() -> None:
    refusal_text = egress_rules([f"n{index}.example" for index in range(100)], []).refusal(
        "other.example", 443
    )
    assert refusal_text is not None
    assert "(n0.example, n1.example," in refusal_text
    assert "and 92 more)" in refusal_text


@given(NAMES, LABELS)
def test_wildcard_excludes_name_itself(name: str, label: str) -> None:
    """A wildcard is all below and not the name itself."""
    assert pattern_covers(f"*.{name}", f"{label}.{name}")
    assert pattern_covers(f"*.{name}", f"{label}.{label}.{name}")
    assert pattern_covers(f"*.{name}", f"*.{label}.{name}"), "a task may ask for a part of what a node allows"
    assert not pattern_covers(f"*.{name}", name)
    assert not pattern_covers(f"*.{name}", f"{label}{name}")
    assert not pattern_covers(f"*.{label}.{name}", f"*.{name}"), "nor for more of it"
    assert not pattern_covers(name, f"*.{name}")
    assert pattern_covers("*", name)
    assert pattern_covers("*", f"*.{name}")


@given(NAMES, st.text("cC.", max_size=1))
def test_host_spellings_are_equal(name: str, end: str) -> None:
    """Every spelling of a name is the same."""
    assert spelled(name.upper()) == spelled(f"{name}.") == name
    assert egress_rules([name.title()], []).refusal(f"{name.upper()}.", 443) is None


@given(st.text(max_size=40))
def test_any_text_is_name_or_refused(text: str) -> None:
    """Any text is a name of letters or refused."""
    if name_fault(text) is None:
        name = spelled(text)
        assert set(name) <= set(string.ascii_lowercase + string.digits + "-._")
        assert name.rpartition(".")[2][0] in string.ascii_lowercase, (
            "else a resolver may take it for an address"
        )
        with pytest.raises(ValueError, match="does not appear to be"):
            ipaddress.ip_address(name)


# ── addresses ─────────────────────────────────────────────────────────────────

PRIVATE = [
    *(
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
    ),
    *(
        "169.254.169.254",
        "169.254.170.2",
        "100.64.0.1",
        "100.100.100.200",
        "100.127.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
    ),
    *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *(
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "ff0e::1",
        "100::1",
        "2001:db8::1",
        "3fff::1",
        "5f00::1",
    ),
    *(
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
    ),
    *(
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2002:808:808::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "4000::1",
        "e000::1",
    ),
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "93.184.216.34",
    "2606:4700::1111",
    "2a00:1450:4001::200e",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_are_refused(text: str) -> None:
    refusal = EgressRules(names=("*",)).address_refusal(text)
    assert (
        refusal == f"{text} is not a public address: the node's setting egress_networks may allow its network"
    )


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_allowed(text: str) -> None:
    assert EgressRules(names=("*",)).address_refusal(text) is None


def test_configured_networks_are_allowed() -> None:
    for inside in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "fd12::1"):
        assert RULES.address_refusal(inside) is None
        assert RULES.in_networks(inside)
    for outside in ("10.2.0.1", "::ffff:10.2.0.1", "fd13::1", "127.0.0.1", "169.254.169.254"):
        assert RULES.address_refusal(outside) is not None
        assert not RULES.in_networks(outside)
    assert not RULES.in_networks("8.8.8.8"), "public, and by no setting"


@given(st.ip_addresses(v=4))
def test_wrapped_address_judged_alike(address: ipaddress.IPv4Address) -> None:
    """An address is judged alike in all its wrappings."""
    wrapped = [ipaddress.IPv6Address(f"{prefix}{address}") for prefix in ("::ffff:", "64:ff9b::")]
    assert {is_public(each) for each in wrapped} == {is_public(address)}
    assert not is_public(ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80)))
    assert not is_public(ipaddress.IPv6Address(int(address)))


@given(
    st.sampled_from(
        [
            "0.0.0.0/8",
            "10.0.0.0/8",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "100.64.0.0/10",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "224.0.0.0/3",
        ]
    ),
    st.data(),
)
def test_no_address_of_these_networks_is_public(network: str, data: st.DataObject) -> None:
    assert not is_public(data.draw(st.ip_addresses(network=network)))


@given(st.ip_addresses(v=6))
def test_only_global_ipv6_is_public(address: ipaddress.IPv6Address) -> None:
    """Only the global block of ipv6 is public."""
    if is_public(address):
        assert (
            address in ipaddress.ip_network("2000::/3")
            or address in ipaddress.ip_network("64:ff9b::/96")
            or address.ipv4_mapped
        )


def test_invalid_address_is_refused() -> None:
    assert RULES.address_refusal("pypi.example") == "'pypi.example' is no address"


# ── settings ──────────────────────────────────────────────────────────────────


def test_task_may_use_allowed_names() -> None:
    allowed = ("pypi.example", "*.Python.example.")
    check_egress((), ())
    check_egress(
        (
            "pypi.example",
            "PYPI.example.",
            "files.python.example",
            "*.files.python.example",
            "*.python.example",
        ),
        allowed,
    )
    check_egress(("anything.example", "*.anything.example"), ("*",))


@pytest.mark.parametrize("name", ["other.example", "*.pypi.example", "python.example", "*.example"])
def test_forbidden_name_is_refused_with_setting(name: str) -> None:
    with pytest.raises(
        Refused,
        match=(
            r"this node does not let tasks reach .*: leave it out, or have it added to the node's setting"
            r" egress"
        ),
    ) as refused:
        check_egress(("pypi.example", name), ("pypi.example", "*.python.example"))
    assert refused.value.path == "$.runtime.egress[1]"
    assert name in str(refused.value)


@pytest.mark.parametrize("text", ["10.1.0.0/33", "10.1.2.3/16", "example", "", "10.1.0.0-10.2.0.0"])
def test_invalid_network_is_named_with_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^egress_networks: .* is no network .*: write it as"):
        egress_rules([], [text])


@pytest.mark.parametrize(
    "name",
    [
        "https://pypi.example",
        "pypi.example:443",
        "*",
        "*.pypi.example",
        "**.pypi.example",
        "pypi.example/simple",
        "",
    ],
)
def test_configured_names_are_checked(name: str) -> None:
    """One that is none would allow nothing, and nobody would know why."""
    if name.startswith("*") and not name.startswith("**"):
        assert read_config(flags={"egress": [name]}).egress == (name,)
    else:
        with pytest.raises(
            ConfigError,
            match=(
                r"egress: .* is no host's name: write it as pypi\.example, \*\.pypi\.example or \*, without"
                r" scheme"
            ),
        ):
            read_config(flags={"egress": [name]})


def test_configured_networks_are_checked() -> None:
    assert read_config(flags={"egress_networks": ["10.1.0.0/16", "fd00::/8"]}).egress_networks == (
        "10.1.0.0/16",
        "fd00::/8",
    )
    with pytest.raises(ConfigError, match=r"egress_networks: '10\.1\.2\.3/16' is no network"):
        read_config(flags={"egress_networks": ["10.1.2.3/16"]})
