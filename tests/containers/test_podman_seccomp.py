"""The system calls that sessions may make: Podman's default profile with less allowed, and none added."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from test_podman_probe import FOUND

from polarnode.containers.service import REFUSED, seccomp_profile, session_profile
from polarnode.core.errors import RuntimeFault

ALLOW = {"action": "SCMP_ACT_ALLOW", "args": [], "includes": {}, "excludes": {}}
DEFAULT = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 1,
    "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
    "syscalls": [
        {**ALLOW, "names": ["read", "io_setup", "keyctl", "socketcall", "inotify_init1", "ptrace"]},
        {**ALLOW, "names": ["bpf", "perf_event_open"], "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {**ALLOW, "names": ["socket"], "args": [{"index": 0, "value": 16, "op": "SCMP_CMP_NE"}]},
        {**ALLOW, "names": ["socketpair", "io_uring_setup"]},
    ],
}


def decided(profile: dict[str, Any], name: str, *arguments: int) -> int | None:
    """What the kernel would do with a call: None where it is allowed, else its error."""
    found = {
        rule.get("errnoRet") if rule["action"] == "SCMP_ACT_ERRNO" else None
        for rule in profile["syscalls"]
        if name in rule["names"] and all(_holds(check, arguments) for check in rule["args"])
    }
    assert len(found) <= 1, "no two rules that contradict each other hold for one call"
    return found.pop() if found else profile["defaultErrnoRet"]


def _holds(check: dict[str, Any], arguments: tuple[int, ...]) -> bool:
    given, value = arguments[check["index"]], check["value"]
    if check["op"] == "SCMP_CMP_NE":
        return given != value
    return given >= value if check["op"] == "SCMP_CMP_GE" else given == value


def test_uncounted_system_calls_are_refused() -> None:
    """What no control group counts is refused."""
    profile = session_profile(DEFAULT)
    for name in REFUSED:
        assert decided(profile, name, 0, 0, 0) == errno.ENOSYS, name
    assert decided(profile, "read") is None
    assert decided(profile, "inotify_init1") is None
    assert profile["archMap"] == DEFAULT["archMap"]
    assert "io_setup" in DEFAULT["syscalls"][0]["names"], "the given profile is left as it is"  # type: ignore[index]


@pytest.mark.parametrize(
    ("family", "protocol", "error"),
    [
        (1, 0, None),
        (2, 6, None),
        (10, 17, None),
        (16, 0, None),  # routes
        (16, 12, errno.EPROTONOSUPPORT),  # the packet filter
        (16, 9, errno.EPROTONOSUPPORT),
        (16, 23, errno.EPROTONOSUPPORT),
        (16, (1 << 32) + 12, errno.EPROTONOSUPPORT),
        (0, 0, errno.EAFNOSUPPORT),
        (17, 3, errno.EAFNOSUPPORT),  # packets
        (38, 0, errno.EAFNOSUPPORT),  # the kernel's ciphers
        (40, 0, errno.EAFNOSUPPORT),  # vsock
        ((1 << 32) + 40, 0, errno.EAFNOSUPPORT),  # the same: the kernel drops the high bits
        (99, 0, errno.EAFNOSUPPORT),
    ],
)
def test_only_four_socket_families(family: int, protocol: int, error: int | None) -> None:
    assert decided(session_profile(DEFAULT), "socket", family, 1, protocol) == error


def test_socket_pairs_are_unix_only() -> None:
    profile = session_profile(DEFAULT)
    assert decided(profile, "socketpair", 1, 1, 0) is None
    assert decided(profile, "socketpair", 40, 1, 0) == errno.ENOSYS


@pytest.mark.parametrize("request_", [0, 16, 0x4206])
def test_ptrace_except_traceme(request_: int) -> None:
    asked = errno.EPERM if request_ == 0 else None
    assert decided(session_profile(DEFAULT), "ptrace", request_) == asked
    assert decided(session_profile(DEFAULT, ptrace=True), "ptrace", request_) is None
    nothing = {**DEFAULT, "syscalls": [{**ALLOW, "names": ["read"]}]}
    assert decided(session_profile(nothing), "ptrace", request_) == errno.ENOSYS, "none is added"


def test_permissive_default_is_refused() -> None:
    with pytest.raises(RuntimeFault, match="does not refuse unknown system calls"):
        session_profile({**DEFAULT, "defaultAction": "SCMP_ACT_ALLOW"})


def test_missing_default_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match="no default seccomp profile"):
        seccomp_profile(evolve(FOUND, seccomp=None))
    broken = tmp_path / "seccomp.json"
    broken.write_text("{")
    with pytest.raises(RuntimeFault, match=r"seccomp.json cannot be read: .*reinstall it"):
        seccomp_profile(evolve(FOUND, seccomp=broken))


def test_own_default_allows_common_programs() -> None:
    if not FOUND.seccomp or not FOUND.seccomp.exists():
        pytest.skip("Podman is not installed here")
    profile = json.loads(seccomp_profile(FOUND))
    for name in ("execve", "clone", "fcntl", "inotify_add_watch", "timer_create", "bind"):
        assert decided(profile, name, 0, 0, 0) is None
