"""Tests that run apart from the agent: `config.separate` of `command` and `harbor`.

The test runs in a clean container that holds no file of the agent's and runs none of its programs. The test
calls the agent's programs with `as-agent PROGRAM [ARGUMENT...]`: the node runs them in the agent's own
container, with the workdir as working directory, and returns output and exit code. `plain_files` are copied
from the agent's container as data.

`as-agent` is a shell script. It leaves each request as a numbered file in SPOOL, in the test's container; the
node takes them in order, one at a time. A request is the number of arguments, the arguments, each ended by a
zero byte, and then the standard input. The replies are N.out, N.err and last N.exit.

Invariants: nothing but the arguments and input of a request enters the agent's container; nothing but bounded
bytes leaves it; no link of the agent's is followed; every process that a program started is ended before the
test goes on.
"""

from collections.abc import Awaitable, Callable, Mapping

from attrs import define, evolve, field, frozen

from polarnode.core import codec
from polarnode.core.conversation import Json
from polarnode.core.errors import ContentFault, EvaluatorError, SpoiltRuntime
from polarnode.core.ports import LOST, Runtime, TimedProgram
from polarnode.core.ports import NOT_RUN as UNRUN
from polarnode.core.trajectory import Verdict
from polarnode.evaluators import contract
from polarnode.evaluators.contract import Finished

# ── config ────────────────────────────────────────────────────────────────────


@frozen(kw_only=True)
class SeparateConfig:
    """The shape of `config.separate`. `plain_files`: paths, absolute or relative to the workdir."""

    plain_files: tuple[str, ...] = ()
    program_timeout: float = 60.0  # seconds of one program; the test's own limit holds as well


def asked(config: Mapping[str, Json]) -> bool:
    """Whether a config asks for a separate container."""
    return config.get("separate") is not None


def check(separate: SeparateConfig | None) -> None:
    """Refuse paths that lead elsewhere, and an invalid time limit."""
    if separate is None:
        return
    contract.seconds("separate.program_timeout", separate.program_timeout)
    for path in separate.plain_files:
        if not path.strip("/") or path.endswith("/") or ".." in path.split("/") or "\0" in path:
            raise contract.refused(
                "separate.plain_files",
                f"names {path!r:.80}: name a file, absolute or in the workdir, without ..",
            )


# ── requests ──────────────────────────────────────────────────────────────────

AS_AGENT_PATH = "/usr/local/bin/as-agent"  # on the PATH of nearly every image; AS_AGENT_PATH names it too
SPOOL_DIR = "/tmp/polarnode-agent"
# The most bytes of a request's arguments and input, of each stream of a reply, and of a plain file. A
# program's text data has kilobytes, and a node judges 64 sessions at once.
MAX_DATA_BYTES = 8 << 20
MOST_REQUESTS = 10_000  # of one test; each costs about 0.1 s, so a test that asks for more is in a loop
NOT_RUN, TIMED_OUT_CODE = 125, 124  # exit codes as of timeout(1)

# `ln` gives each number to one request only. The file `next` is a hint, so that a test with many requests
# does not count from 1 each time.
SCRIPT = f"""#!/bin/sh
spool={SPOOL_DIR}
if [ $# -eq 0 ]; then echo "usage: as-agent PROGRAM [ARGUMENT...]" >&2; exit {NOT_RUN}; fi
mine=$(mktemp "$spool/request.XXXXXX") || exit {NOT_RUN}
{{ printf '%s\\0' "$#" "$@"; cat; }} > "$mine" || exit {NOT_RUN}
n=$(cat "$spool/next" 2>/dev/null); n=${{n:-1}}
until ln "$mine" "$spool/$n" 2>/dev/null; do
  [ -e "$spool/$n" ] || {{ echo "as-agent: $spool cannot be written" >&2; exit {NOT_RUN}; }}
  n=$((n + 1))
done
echo "$((n + 1))" > "$spool/next"
until [ -s "$spool/$n.exit" ]; do sleep 0.02 2>/dev/null || sleep 1; done
: > "$mine"
cat "$spool/$n.out"; cat "$spool/$n.err" >&2
read -r code < "$spool/$n.exit"
rm -f "$mine" "$spool/$n.out" "$spool/$n.err"
exit "$code"
"""


@frozen(kw_only=True)
class Request:
    """What a test asked for."""

    argv: tuple[str, ...]
    stdin: bytes


def parse_request(content: bytes) -> Request | None:
    """The request of a file that `as-agent` wrote; None for anything else."""
    count, _, rest = content.partition(b"\0")
    if not count.isdigit() or len(count) > len(str(MAX_DATA_BYTES)) or int(count) == 0:
        return None
    *arguments, stdin = rest.split(b"\0", int(count))
    if len(arguments) != int(count):
        return None
    try:
        return Request(argv=tuple(each.decode() for each in arguments), stdin=stdin)
    except UnicodeDecodeError:
        return None


@frozen(kw_only=True)
class ProgramReply:
    """What a test gets back."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""


def _not_run_reply(reason: str) -> ProgramReply:
    return ProgramReply(exit_code=NOT_RUN, stderr=f"as-agent: {reason}\n".encode())


@define(eq=False, kw_only=True)
class AgentRequests:
    """The requests of one test, which runs as `user` in `clean`."""

    finished: Finished
    separate: SeparateConfig
    user: str | None
    count: int = field(default=0, init=False)
    missing_program_code: int | None = field(
        default=None, init=False
    )  # the last code of a program as if one were missing

    @property
    def clean(self) -> Runtime:
        """Where the test runs."""
        return self.finished.runtime

    async def attend(self) -> bool:
        """Answer the next request; False if there is none yet."""
        path = f"{SPOOL_DIR}/{self.count + 1}"
        content = await self.clean.read(path, limit=MAX_DATA_BYTES + 1)
        if content is None:
            return False
        self.count += 1
        reply = await self._reply(content)
        await self.clean.put({f"{path}.out": reply.stdout, f"{path}.err": reply.stderr}, user=self.user)
        # This file is written last, because the script waits for it.
        await self.clean.put({f"{path}.exit": f"{reply.exit_code}\n".encode()}, user=self.user)
        return True

    async def _reply(self, content: bytes) -> ProgramReply:
        if len(content) > MAX_DATA_BYTES:
            return _not_run_reply(f"arguments and input are longer than {MAX_DATA_BYTES >> 20} MiB")
        if self.count > MOST_REQUESTS:
            return _not_run_reply(f"a test may run {MOST_REQUESTS} programs")
        request = parse_request(content)
        if request is None:
            return _not_run_reply("a request is a program and its arguments, in UTF-8")
        within_s = self.separate.program_timeout
        program = TimedProgram(
            argv=request.argv, stdin=request.stdin, within_s=within_s, keep=MAX_DATA_BYTES + 1
        )
        try:
            ended = (await self.finished.clock.run(self.finished.left, program)).ended
        except (ContentFault, SpoiltRuntime) as error:  # the agent made what prevents the run
            return _not_run_reply(str(error))
        if ended is None:
            return ProgramReply(
                exit_code=TIMED_OUT_CODE, stderr=f"as-agent: ended after {within_s:g} seconds\n".encode()
            )
        if ended.exit_code == LOST:
            return _not_run_reply(
                "the program let itself be traced (PTRACE_TRACEME), so that its exit code is lost"
            )
        if max(len(ended.stdout), len(ended.stderr)) > MAX_DATA_BYTES:
            return _not_run_reply(f"the program's output is longer than {MAX_DATA_BYTES >> 20} MiB")
        if ended.exit_code in UNRUN and await self._there(request.argv[0]):
            self.missing_program_code = ended.exit_code
        return ProgramReply(exit_code=ended.exit_code, stdout=ended.stdout, stderr=ended.stderr)

    async def _there(self, name: str) -> bool:
        """Whether the agent's container has a program. If so, the program itself chose its exit code."""
        argv = ("sh", "-c", 'command -v -- "$1"', "sh", name)
        look = TimedProgram(argv=argv, within_s=self.separate.program_timeout, keep=MAX_DATA_BYTES)
        found = (await self.finished.clock.run(self.finished.left, look)).ended
        return found is not None and found.exit_code == 0


# ── a test apart ──────────────────────────────────────────────────────────────

Test = Callable[[], Awaitable[Verdict]]


async def judged(
    finished: Finished, separate: SeparateConfig | None, user: str | None, test: Test
) -> Verdict:
    """The test's verdict. With `separate` the test runs apart from the agent, and can use `as-agent`."""
    if separate is None:
        try:
            return await test()
        except contract.TestNotRun as error:
            unrun = error
        verdict = await contract.spoilt(finished, unrun)
        if verdict is None:
            raise unrun
        return verdict
    if finished.left is finished.runtime:
        raise EvaluatorError("separate needs a clean container beside the agent's")
    await finished.prepare()
    missing = await _copy_plain_files(finished, separate, user)
    await _remove(finished.runtime, SPOOL_DIR)  # requests of an evaluator before this one would run again
    await finished.runtime.put({AS_AGENT_PATH: SCRIPT.encode()}, user="0", mode=0o755)
    await finished.runtime.put({f"{SPOOL_DIR}/.keep": b""}, user=user)
    requests = AgentRequests(finished=finished, separate=separate, user=user)
    try:
        verdict = await finished.clock.beside(test, requests.attend)
    except contract.TestNotRun:
        if requests.missing_program_code is None:
            raise
        why = (
            f"a program of the agent's ended with exit code {requests.missing_program_code}, and the test"
            " with it"
        )
        verdict = Verdict(reward=0.0, metrics={"reason": why})
    metrics: dict[str, Json] = {"programs": requests.count}
    if missing:
        metrics["missing_files"] = list(missing)
    return evolve(verdict, metrics={**verdict.metrics, "separate": metrics})


async def _copy_plain_files(
    finished: Finished, separate: SeparateConfig, user: str | None
) -> tuple[str, ...]:
    """Copy the plain files to the same paths. A file that is missing, is no plain file or is too large is
    removed from the clean container too. Return the paths of these files.
    """
    missing: list[str] = []
    for name in separate.plain_files:
        path = codec.in_workdir(name, finished.left.workdir)
        content = await contract.content(finished.left, path, limit=MAX_DATA_BYTES + 1)
        if content is None or len(content) > MAX_DATA_BYTES:
            missing.append(name)
            await _remove(finished.runtime, path)
        else:
            await finished.runtime.put({path: content}, user=user)
    return tuple(missing)


async def _remove(clean: Runtime, path: str) -> None:
    """Remove a path as the runtime's user or as root. Without capabilities root can only remove its own."""
    for user in (None, "0"):
        ended = await clean.run(["rm", "-rf", "--", path], user=user, workdir="/")
        if ended.exit_code == 0:
            return
    raise EvaluatorError(f"{path} of the image could not be removed: {contract.stderr_tail(ended.stderr)}")
