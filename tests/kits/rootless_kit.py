"""A user of this machine without root, for as long as a test: an id of their own, subordinate ids, a home.

Everything is in a private mount namespace, so that /etc stays as it is and nothing is left but the home,
which is removed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

from attrs import define

from polarnode.containers.probe import default_state_dir

ROOT = Path(__file__).parents[2]
UID = 54321
FIRST, IDS = 0x6000_0000, 65536  # subordinate ids
LIMIT_S = 300.0  # of one program; 20 quiet

# $1: the home. Python, or the checkout, may be below a folder that is root's alone.
ENTER = """
set -e
home=$1; shift
for name in passwd group subuid subgid; do
  touch /etc/$name; cp /etc/$name "$home/.etc-$name"
done
echo "polarnode-test:x:$UID_:$UID_::$home:/bin/sh" >> "$home/.etc-passwd"
echo "polarnode-test:x:$UID_:" >> "$home/.etc-group"
printf %s "$SUBIDS" > "$home/.etc-subuid"; printf %s "$SUBIDS" > "$home/.etc-subgid"
for name in passwd group subuid subgid; do mount --bind "$home/.etc-$name" /etc/$name; done
if [ -n "$CLOSED" ]; then
  mkdir -p "$home/.kept"; mount --bind "$CLOSED" "$home/.kept"
  mount -t tmpfs -o mode=755 none "$CLOSED"
  for path in $OPENED; do mkdir -p "$path"; mount --bind "$home/.kept/${path#$CLOSED/}" "$path"; done
fi
cd "$home"
exec setpriv --reuid "$UID_" --regid "$UID_" --clear-groups --bounding-set=-all,+setuid,+setgid,+sys_admin,+dac_override \\
  env -i "$@"
"""


@define(eq=False)
class User:
    """`home` is theirs. `subordinate`: whether /etc/subuid gives them ids."""

    home: Path

    def run(self, *argv: str, subordinate: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a program as them to its end."""
        command, environment = self._command(argv, subordinate)
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    @contextmanager
    def running(self, *argv: str, subordinate: bool = True) -> "Iterator[subprocess.Popen[bytes]]":
        """Run a program as them while the block does; it is killed if it is not over by then."""
        command, environment = self._command(argv, subordinate)
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.kill()

    def _command(self, argv: Sequence[str], subordinate: bool) -> tuple[list[str], dict[str, str]]:
        """With nothing of our environment but where certificates are. Each part replaces the one before it,
        so that the process is the program.
        """
        passed = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
        own = {
            "HOME": str(self.home / ("home" if subordinate else "other")),
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "XDG_RUNTIME_DIR": str(self.home / ("run" if subordinate else "other")),
            "LANG": "C.UTF-8",
        }
        closed, opened = _closed()
        command = [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", str(self.home)),
            *(f"{name}={value}" for name, value in {**passed, **own}.items()),
            *argv,
        ]
        return command, {
            "PATH": os.environ["PATH"],
            "UID_": str(UID),
            "SUBIDS": f"polarnode-test:{FIRST}:{IDS}\n" if subordinate else "",
            "CLOSED": closed,
            "OPENED": " ".join(opened),
        }

    def polarnode(self, *words: str, subordinate: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.run(sys.executable, "-B", "-m", "polarnode.cli", *words, subordinate=subordinate)

    def processes(self) -> dict[int, str]:
        """Command lines of their processes, and of those of their subordinate ids, by process id."""
        found = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and _is_theirs(folder.stat().st_uid):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found


def _is_theirs(uid: int) -> bool:
    return uid == UID or FIRST <= uid < FIRST + IDS


def _closed() -> tuple[str, list[str]]:
    """A folder that only root may enter and has what a program needs, and what it needs of it."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    for path in needed:
        for folder in reversed(path.parents):
            if folder.stat().st_mode & 0o005 != 0o005:
                below = {str(each) for each in needed if each.is_relative_to(folder)}
                return str(folder), sorted(below)
    return "", []


@contextmanager
def open_user() -> Iterator[User]:
    """On the file system of the machine's own store, so that what works there works here."""
    default_state_dir().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="rootless-", dir=default_state_dir().parent))
    folder.chmod(0o755)
    for name in ("home", "run", "other"):
        (folder / name).mkdir(mode=0o700)
        os.chown(folder / name, UID, UID)
    user = User(folder)
    try:
        yield user
    finally:
        for pid in user.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
