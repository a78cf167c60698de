"""How an evaluator runs a program: within its own seconds, both streams as one text, and only its end kept.

There is no clock below the shell, so it is the container's own `timeout` that ends a program; an image without one has the session's post
budget. The rule for whoever edits it: whatever a test started is ended before anything is read that it may have written.
"""

from collections.abc import Iterable, Mapping

from attrs import frozen

from polarnode.conversation import Json
from polarnode.ports import Runtime

TAIL = 2000  # characters of an output kept in metrics: enough for a traceback's end
LOG_BYTES = 2 << 20  # of an output that are read for names of tests: a suite prints some 100 KB, and reading 2 MiB holds the event loop for 0.2 s
NAMES = 50  # names of tests shown of each kind: a person reads no more, and PASS_TO_PASS has thousands
NAME = 200  # characters of one name: parametrized ids hold whole documents
GRACE_S = 5  # seconds between TERM and KILL: pytest writes its summary in them
TOLD = b"timed out\n"  # said on the stderr the program does not have: its exit code alone may be its own, or the kernel's out of memory

# `timeout` puts the program into a process group of its own and ends the group. Bash where there is one: conda's activation needs it.
WITHIN = """
shell=sh; command -v bash >/dev/null 2>&1 && shell=bash
if ! command -v timeout >/dev/null 2>&1; then exec "$shell" -c "$3" 2>&1; fi
began=$(date +%s)
timeout -k "$1" "$2" "$shell" -c "$3" 2>&1
code=$?
case $code in 124|137) [ $(($(date +%s) - began)) -ge "${2%.*}" ] && echo "timed out" >&2 ;; esac
exit "$code"
"""


@frozen(kw_only=True)
class Ran:
    """A test that ended, or was ended. `truncated`: the beginning of its output is not kept."""

    exit_code: int
    output: str
    timed_out: bool
    truncated: bool

    @property
    def tail(self) -> str:
        """The end of its output."""
        return self.output[-TAIL:]

    @property
    def _said(self) -> dict[str, Json]:
        return {**({"timed_out": True} if self.timed_out else {}), **({"output_cut": True} if self.truncated else {})}

    @property
    def metrics(self) -> dict[str, Json]:
        """What is kept of it with a verdict."""
        return {"exit_code": self.exit_code, "output_tail": self.tail, **self._said}


async def run_script(
    runtime: Runtime, script: str, *, within_s: float, user: str | None = None, workdir: str | None = None, env: Mapping[str, str] | None = None
) -> Ran:
    """Run a text of shell for at most so many seconds; then nothing that it started runs any more."""
    argv = ["sh", "-c", WITHIN, "sh", f"{GRACE_S}", f"{within_s:g}", script]
    ended = await runtime.run(argv, user=user, workdir=workdir, env=env)
    await runtime.end_processes()
    output = ended.stdout[-LOG_BYTES:].decode("utf-8", "replace")
    cut = ended.truncated or len(ended.stdout) > LOG_BYTES
    return Ran(exit_code=ended.exit_code, output=output, timed_out=ended.stderr == TOLD, truncated=cut)


def shown(names: Iterable[str]) -> list[Json]:
    """Some names, for a person."""
    kept = sorted(names)
    more = [f"… and {len(kept) - NAMES} more"] if len(kept) > NAMES else []
    return [*(name[:NAME] for name in kept[:NAMES]), *more]


def last_words(output: bytes) -> str:
    """The end of what a program said, in a sentence about its failure."""
    return output.decode("utf-8", "replace").strip()[-500:]
