"""What a process may do, read from the kernel's map of its ids; and who may not have a namespace, and why."""

import os
from pathlib import Path

import pytest

from polarnode.containers.user_namespace import (
    CONFIGURED_VARIABLE,
    IDS,
    ProcessRights,
    enter_user_namespace,
    read_rights,
)
from polarnode.core.errors import RuntimeFault

MACHINE = "         0          0 4294967295\n"
PODMAN = "         0       1000          1\n         1     100000      65536\n"
SINGLE = "         0       1000          1\n"
GAP = "         0       1000          1\n       500     100000      65536\n"


@pytest.mark.parametrize(
    ("uid", "text", "rights"),
    [
        (0, MACHINE, ProcessRights(kind="root", ids=4294967295)),
        (0, PODMAN, ProcessRights(kind="namespace", ids=65537)),
        (0, SINGLE, ProcessRights(kind="namespace", ids=1)),
        (0, GAP, ProcessRights(kind="namespace", ids=1)),
        (1000, MACHINE, ProcessRights(kind="user", ids=4294967295)),
    ],
)
def test_rights_follow_from_user_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, text: str, rights: ProcessRights
) -> None:
    (tmp_path / "uid_map").write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert read_rights(tmp_path) == rights


def test_root_process_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "execve", None)
    enter_user_namespace()


def test_second_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv(CONFIGURED_VARIABLE, "done")
    with pytest.raises(RuntimeFault, match="is set, and this process is not root: unset it"):
        enter_user_namespace()


PROGRAMS = {"podman": "", "newuidmap": "", "nsenter": ""}
ANSWERS = {
    "": "no user namespace \\(no reason given\\)",
    "echo cannot clone: Operation not permitted >&2; exit 125": "\\(cannot clone: Operation not permitted\\)",
    "echo 'user:[1]'; echo '0 1000 1'": f"has 1 ids of its own, where containers need {IDS}",
    "echo 'user:[1]'; echo '0 1000 1'; echo '1 100000 65536'": "podman system migrate",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_missing_podman_rights_have_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    for name in PROGRAMS:
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeFault, match=ANSWERS[answer]):
        enter_user_namespace()


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeFault, match="podman is not installed: an administrator has to run, once"):
        enter_user_namespace()
