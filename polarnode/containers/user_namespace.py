"""A node without root enters a user namespace in which it is root of its own ids.

Podman keeps one namespace for each user of a machine, with the ids that /etc/subuid and /etc/subgid give to
the user, and a process of Podman holds it open. A node enters that namespace, so that several nodes and
`podman` see the same containers. The program is replaced (exec), so that the node keeps its process id and
gets its signals itself. Invariant: a process that is root already, here or in a namespace, is left as it is.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from attrs import frozen

from polarnode.core.errors import RuntimeFault

ALL_IDS: Final = (1 << 32) - 1  # the number of ids in the first user namespace
# The number of ids in a container: as many as images use (`nobody` is 65534), and as many as Debian gives a
# user.
IDS: Final = 65536
# Seconds that Podman may take to make its namespace; 0.3 on a quiet machine.
ENTER_S: Final = 30.0
# Podman's own names for a process that it has already put into its namespace
CONFIGURED_VARIABLE, USER, GROUP = (
    "_CONTAINERS_USERNS_CONFIGURED",
    "_CONTAINERS_ROOTLESS_UID",
    "_CONTAINERS_ROOTLESS_GID",
)
PASSED_VARIABLES = (CONFIGURED_VARIABLE, USER, GROUP, "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
# Enters the working directory again, by its name. The inherited one belongs to the other mount namespace and
# has no name in this one, so that `podman build DIR` would not find a relative DIR.
RETURN_TO_DIR = 'cd "$0" 2>/dev/null; exec "$@"'
HOLDER_PROGRAMS = (
    "catatonit",
    "podman pause",
    "podman",
)  # the process that Podman keeps in it, by Podman's version
ADMINISTRATOR_REMEDY = (
    "an administrator has to run, once: apt-get install --no-install-recommends podman uidmap catatonit;"
    " usermod --add-subuids 100000-165535 --add-subgids 100000-165535 YOUR_NAME; without it, --no-containers"
    " takes captures"
)


# Whether a node starts on a machine that does not enforce every limit of a session.
Limits = Literal["enforced", "best_effort"]


@frozen(kw_only=True)
class ProcessRights:
    """The rights of a process. `kind`: root of the machine, root of a user namespace, or a user. `ids`: how
    many consecutive user ids from 0 on there are.
    """

    kind: Literal["root", "namespace", "user"]
    ids: int


def read_rights(proc: Path = Path("/proc/self")) -> ProcessRights:
    """What this process may do."""
    ids = 0
    for line in (proc / "uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside == ids:
            ids += count
    if os.geteuid() != 0:
        return ProcessRights(kind="user", ids=ids)
    return ProcessRights(kind="root" if ids >= ALL_IDS else "namespace", ids=ids)


def enter_user_namespace(argv: Sequence[str] = sys.orig_argv) -> None:
    """Replace this program by itself as root of the user's namespace. Return if it is root already. Raises
    RuntimeFault, which says what is missing.
    """
    if os.geteuid() == 0:
        return
    if CONFIGURED_VARIABLE in os.environ:
        raise RuntimeFault(f"{CONFIGURED_VARIABLE} is set, and this process is not root: unset it")
    pause = _pause_process()
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        raise RuntimeFault("nsenter is not installed: apt-get install util-linux")
    own = {CONFIGURED_VARIABLE: "done", USER: str(os.getuid()), GROUP: str(os.getgid())}
    words = ["--user", "--mount", "--target", str(pause), "--setuid", "0", "--setgid", "0", "--wd=."]
    within = ["sh", "-c", RETURN_TO_DIR, os.getcwd()]
    os.execve(nsenter, [nsenter, *words, "--", *within, sys.executable, *argv[1:]], {**os.environ, **own})


def _pause_process() -> int:
    """The process that holds the namespace of this user. Podman starts it if it does not run."""
    podman = shutil.which("podman")
    if podman is None or shutil.which("newuidmap") is None:
        missing = "podman" if podman is None else "newuidmap"
        raise RuntimeFault(f"this user is not root, and {missing} is not installed: {ADMINISTRATOR_REMEDY}")
    try:
        done = subprocess.run(
            [podman, "unshare", "sh", "-c", "readlink /proc/self/ns/user; cat /proc/self/uid_map"],
            capture_output=True,
            text=True,
            timeout=ENTER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeFault(
            f"podman unshare did not answer within {ENTER_S:.0f} s: run it to see why"
        ) from None
    namespace, *ranges = done.stdout.splitlines() or [""]
    if done.returncode != 0 or not ranges:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeFault(f"podman gives this user no user namespace ({reason}): {ADMINISTRATOR_REMEDY}")
    ids = sum(int(line.split()[2]) for line in ranges)
    if ids < IDS:
        raise RuntimeFault(
            f"this user is not root and has {ids} ids of its own, where containers need {IDS}:"
            f" {ADMINISTRATOR_REMEDY}"
        )
    return _holder(namespace)


def _holder(namespace: str) -> int:
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                folder.name.isdigit()
                and os.readlink(folder / "ns" / "user") == namespace
                and (folder / "comm").read_text().strip() in HOLDER_PROGRAMS
            ):
                return int(folder.name)
    raise RuntimeFault(
        "podman keeps no process in this user's namespace: `podman system migrate` starts it again"
    )
