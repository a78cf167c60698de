"""The evaluator interface, and what several evaluators share: config checks, reward checks, test programs.

An evaluator is an async function from a finished session to a verdict. It judges in the harness's runtime,
after the harness's processes have ended, or in a clean runtime with a copy of the workspace. It does not
import Trio and awaits only runtimes and judges; the session's post budget ends it when it hangs.

Invariants: a reward that is no finite number, or that belongs to no turn or lineage of the session, is an
error and never dropped. Every process that a test started is ended before its results are read. The
container's own `timeout` limits a program; in an image without that program only the post budget does.
"""

import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from posixpath import normpath
from typing import TypeGuard, TypeVar

from attrs import field, frozen

from polarnode.core import codec
from polarnode.core.codec.limits import REWARD
from polarnode.core.conversation import Json
from polarnode.core.errors import ContentFault, EvaluatorError, Refused
from polarnode.core.ports import NOT_RUN, Clock, Judge, Runtime
from polarnode.core.task import FileSpec
from polarnode.core.trajectory import Outcome, Turn, Verdict

# ── evaluator ──────────────────────────────────────────────────────────────────


async def _prepared() -> None:
    """Do nothing."""


@frozen(kw_only=True)
class KeptWork:
    """What is left of a session that ended long ago: the path of the container's folder that was kept, and
    the agent's work as a patch, which its first evaluation stored.
    """

    folder: str | None = None
    patch: bytes | None = None


@frozen(kw_only=True)
class Finished:
    """A finished session, as an evaluator sees it.

    `runtime`: where to judge. `left`: the harness's own runtime, in which all processes have ended; it is the
    same as `runtime` unless the evaluator has a fresh one. `clock`: runs the agent's programs, which may
    never end. `judge(name)`: a judge of the node's config; raises EvaluatorError for an unknown name.
    `prepare`: runs the task's `eval_prepare` in `runtime`. An evaluator with `copies=False` and a fresh
    runtime awaits it after it has moved the agent's work there; for any other evaluator it has already run.
    `kept`: if a session is evaluated again, the part of it that `left` still has; None means all of it.
    `brought`: the files that the task brings, which are not the agent's work, by absolute path and with their
    original content.
    """

    runtime: Runtime
    left: Runtime
    clock: Clock
    judge: Callable[[str], Judge]
    outcome: Outcome
    turns: tuple[Turn, ...]
    instruction: str
    config: Mapping[str, Json]
    metadata: Mapping[str, Json]
    prepare: Callable[[], Awaitable[None]] = _prepared
    kept: KeptWork | None = None
    brought: Mapping[str, FileSpec] = field(factory=dict)


EvaluateFunction = Callable[[Finished], Awaitable[Verdict]]


def _never(config: Mapping[str, Json]) -> bool:
    """Return False, because no config of such an evaluator asks for separation."""
    return False


@frozen(kw_only=True)
class AllowedNames:
    """The module prefixes and judges that the node's config lets a task name. `judges=None`: the judges are
    not known, and none is refused.
    """

    imports: tuple[str, ...] = ()
    judges: Collection[str] | None = None


@frozen(kw_only=True)
class Evaluator:
    """One evaluator. `check` raises Refused for an invalid config, when the task is submitted.

    `fresh`: it always judges in a fresh runtime. `copies`: the harness's workdir is copied into a fresh
    runtime before it judges; False if it reads from `Finished.left` itself. `separates(config)`: whether it
    judges with this config in a fresh runtime without that copy, whatever `fresh` and `copies` are.
    `only_programs`: only the agent's programs run where it judges. If the node ends such a program because of
    what it wrote, that is a failed case, and the verdict holds.
    """

    name: str
    evaluate: EvaluateFunction
    check: Callable[[Mapping[str, Json]], None]
    fresh: bool = False
    copies: bool = True
    separates: Callable[[Mapping[str, Json]], bool] = _never
    only_programs: bool = False


# ── config checks ──────────────────────────────────────────────────────────────

Config = TypeVar("Config")
ROOT = "$.evaluator.config"
MAX_COMMAND_BYTES = 100_000  # Linux allows 131,072 bytes per argument, and a wrapper script is added


def read(config: Mapping[str, Json], shape: type[Config]) -> Config:
    """Read the config into its shape, an attrs class. A field that is unknown, missing or of another type is
    refused.
    """
    try:
        return codec.structure(dict(config), shape, forbid_extra=True)
    except Refused as refused:
        path = (refused.path or "$").replace("$", ROOT, 1)
        raise Refused(f"evaluator.config.{refused}" if path != ROOT else str(refused), path=path) from refused


def refused(name: str, message: str) -> Refused:
    """Return the refusal of one field of the config."""
    return Refused(f"{name} {message}", path=f"{ROOT}.{name}")


def absolute(name: str, path: str) -> None:
    """Refuse a text that is no absolute path inside a runtime."""
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise refused(name, "must be an absolute path in the runtime, without ..")


def seconds(name: str, value: float) -> None:
    """Refuse a number that is no valid time limit."""
    if not 0 < value < 1e9:
        raise refused(name, "must be a number of seconds greater than 0")


def command(name: str, text: str | None) -> None:
    """Refuse a command that no shell can run: an empty one, or one that does not fit into an argument."""
    if text is not None and (not text.strip() or "\0" in text):
        raise refused(name, "must be a command, not an empty text")
    if text is not None and len(text.encode()) > MAX_COMMAND_BYTES:
        raise refused(
            name, f"is longer than {MAX_COMMAND_BYTES} bytes: put it into a file of the runtime and run that"
        )


# ── rewards ────────────────────────────────────────────────────────────────────


RANGE = f", from -{REWARD:g} to {REWARD:g}"


def is_finite(reward: object) -> TypeGuard[float]:
    """Whether a reward is an int or float from -REWARD to REWARD; a bool is not, and NaN fails the
    comparison.
    """
    return isinstance(reward, int | float) and not isinstance(reward, bool) and -REWARD <= reward <= REWARD


def finite(reward: object, what: str) -> float:
    """The reward as a float; `what` names it, such as "its reward"."""
    if not is_finite(reward):
        raise EvaluatorError(f"the evaluator gave {reward!r:.80} as {what}: return a finite number{RANGE}")
    return float(reward)


def checked_numbers(rewards: object, there: Collection[int], what: str) -> dict[int, float]:
    """Check rewards by the number of a turn or lineage (`what`), each of which must be one of `there`."""
    if not isinstance(rewards, Mapping):
        raise EvaluatorError(
            f"the evaluator gave {type(rewards).__name__} as its {what} rewards: return a mapping from a"
            f" {what}'s number to a reward"
        )
    for number in rewards:
        if isinstance(number, bool) or not isinstance(number, int) or number not in there:
            raise EvaluatorError(
                f"the evaluator gave a reward to {what} {number!r:.80}, which this session has not: it has"
                f" {_listed(there)}"
            )
    return {number: finite(reward, f"the reward of {what} {number}") for number, reward in rewards.items()}


def checked_rewards(verdict: Verdict, turns: Sequence[Turn]) -> tuple[dict[int, float], dict[int, float]]:
    """Check the rewards of lineages and of turns in a verdict, which must belong to this session."""
    lineages = checked_numbers(verdict.lineage_rewards, {turn.lineage for turn in turns}, "lineage")
    return lineages, checked_numbers(verdict.turn_rewards, {turn.index for turn in turns}, "turn")


def _listed(there: Collection[int]) -> str:
    if not there:
        return "none"
    return f"{min(there)} to {max(there)}" if len(there) > 1 else str(min(there))


def summed(verdicts: Sequence[tuple[float, Verdict]]) -> tuple[float, dict[int, float], dict[int, float]]:
    """The weighted sum of verdicts: the session's reward, rewards by lineage, rewards by turn.

    If only some verdicts reward a lineage, the others add their session reward to it, because the lineage's
    traces would have had that reward. A verdict without a reward for a turn adds nothing to that turn.
    """
    lineages = sorted({lineage for _, verdict in verdicts for lineage in verdict.lineage_rewards})
    turns = sorted({turn for _, verdict in verdicts for turn in verdict.turn_rewards})
    session = sum(weight * verdict.reward for weight, verdict in verdicts)
    by_lineage = {
        each: sum(weight * verdict.lineage_rewards.get(each, verdict.reward) for weight, verdict in verdicts)
        for each in lineages
    }
    by_turn = {
        each: sum(weight * verdict.turn_rewards.get(each, 0.0) for weight, verdict in verdicts)
        for each in turns
    }
    return session, by_lineage, by_turn


# ── test programs ──────────────────────────────────────────────────────────────

TAIL = 2000  # characters of an output kept in metrics: enough for a traceback's end
# The last bytes of an output that are read for names of tests. A suite prints some 100 KB, and reading 2 MiB
# holds the event loop for 0.2 s.
LOG_BYTES = 2 << 20
NAMES = 50  # test names shown per kind; PASS_TO_PASS can have thousands
NAME = 200  # characters of one name: parametrized ids hold whole documents
LINE = 500  # characters of the line that says which program was not found; runc writes a path before it
GRACE_S = 5  # seconds between TERM and KILL: pytest writes its summary in them
# The wrapper script writes this to its stderr, which the program does not have. The exit code does not prove
# a time-out, because the program may choose it, or the kernel may have ended the program for its memory.
TIMED_OUT = b"timed out\n"

# Runs a script from standard input and not from an argument, because everything in a container, the tested
# program too, can read /proc/PID/cmdline, and a script may hold the expected answers.
RUN_STDIN_SCRIPT = (
    'polarnode_script=$(cat); exec </dev/null; eval "unset polarnode_script\n$polarnode_script"'
)

# `timeout` puts the program into a process group of its own and ends that group. Bash is used if the image
# has it, because conda's activation needs it. $3 is RUN_STDIN_SCRIPT.
TIMED_SCRIPT = """
shell=sh; command -v bash >/dev/null 2>&1 && shell=bash
if ! command -v timeout >/dev/null 2>&1; then exec "$shell" -c "$3" 2>&1; fi
began=$(date +%s)
timeout -k "$1" "$2" "$shell" -c "$3" 2>&1
code=$?
case $code in 124|137) [ $(($(date +%s) - began)) -ge "${2%.*}" ] && echo "timed out" >&2 ;; esac
exit "$code"
"""


@frozen(kw_only=True)
class ProgramResult:
    """The result of a program. `truncated`: the beginning of its output was dropped."""

    exit_code: int
    output: str
    timed_out: bool
    truncated: bool

    @property
    def tail(self) -> str:
        """The end of its output."""
        return self.output[-TAIL:]

    @property
    def _flag_metrics(self) -> dict[str, Json]:
        return {
            **({"timed_out": True} if self.timed_out else {}),
            **({"output_cut": True} if self.truncated else {}),
        }

    @property
    def metrics(self) -> dict[str, Json]:
        """What is stored with the verdict."""
        return {"exit_code": self.exit_code, "output_tail": self.tail, **self._flag_metrics}


async def run_script(
    runtime: Runtime,
    script: str,
    *,
    within_s: float,
    user: str | None = None,
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
) -> ProgramResult:
    """Run a shell script for at most `within_s` seconds, then end every process it started."""
    argv = ["sh", "-c", TIMED_SCRIPT, "sh", f"{GRACE_S}", f"{within_s:g}", RUN_STDIN_SCRIPT]
    ended = await runtime.run(argv, user=user, workdir=workdir, env=env, stdin=script.encode())
    await runtime.end_processes()
    # A runtime that finds no shell says so on stderr.
    whole = ended.stdout + (ended.stderr if ended.exit_code in NOT_RUN else b"")
    output = whole[-LOG_BYTES:].decode("utf-8", "replace")
    cut = ended.truncated or len(whole) > LOG_BYTES
    return ProgramResult(
        exit_code=ended.exit_code, output=output, timed_out=ended.stderr == TIMED_OUT, truncated=cut
    )


def shown(names: Iterable[str]) -> list[Json]:
    """Return the first NAMES names, sorted and shortened, and the number of the others."""
    kept = sorted(names)
    more = [f"… and {len(kept) - NAMES} more"] if len(kept) > NAMES else []
    return [*(name[:NAME] for name in kept[:NAMES]), *more]


# How shells, env, timeout and runc report a program that they could not run.
UNRUN = re.compile(
    r"""exec: "(?P<exec>[^"]+)": |["'`‘]?(?P<name>[^\s"'`‘’:]+)["'`’]?: """
    r"(?:command not found|not found|No such file|Permission denied|Is a directory|cannot execute)",
    re.IGNORECASE,
)
# Shells write the name of the script before such a report: "run.sh: line 3: " or "./run.sh: 3: ".
CALLER_PREFIX = re.compile(r"(?P<script>[^:\n]+): (?:line )?\d+: $")
SHELLS = ("sh", "bash", "dash", "ash", "zsh")  # the names that they write if the script has no name


# A path in the position of a command in a test's script.
RUN_PATH = re.compile(
    r"(?:^|[;&|(!`]|\b(?:then|else|do|if|while|exec|env|time)\s)\s*(?P<path>[\w.~-]*/[\w./~-]+)", re.MULTILINE
)


class TestNotRun(EvaluatorError):
    """A test ended like one whose program is missing. `files`: the files that the task brought and that the
    test's output names.
    """

    __test__ = False  # no test of pytest's

    def __init__(self, sentence: str, files: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.files = files


def require_test_ran(finished: Finished, exit_code: int, output: str) -> dict[str, Json]:
    """Raise TestNotRun if a test without a reward could not run: its exit code says so, and it judged
    nothing. If a program of the agent's is missing, or runs a program that is missing, the test has failed;
    then return the metric that says so.
    """
    if exit_code not in NOT_RUN:
        return {}
    found = list(UNRUN.finditer(output))
    name = found[-1]["exec"] or found[-1]["name"] if found else ""
    if "/" in name and _belongs_to_agent(finished, name):
        return {"reason": f"the test ran {name:.{NAME}}, which the agent did not leave as a program"}
    before = output[: found[-1].start()].rpartition("\n")[2] if found else ""
    called = CALLER_PREFIX.match(before)
    script = called["script"] if called else SHELLS[0]
    if script not in SHELLS and _belongs_to_agent(finished, script):
        return {"reason": f"{script:.{NAME}}, the agent's, ran {name:.{NAME}}, which is not there"}
    own = next(filter(partial(_belongs_to_agent, finished), _config_programs(finished)), None)
    if own is not None and not found:  # shells and Podman name what they do not find
        return {"reason": f"the test ran {own:.{NAME}}, the agent's, which ended with exit code {exit_code}"}
    said = next(
        (line.strip() for line in reversed(output.splitlines()) if line.strip()), "it printed nothing"
    )
    named = (normpath(codec.in_workdir(each, finished.runtime.workdir)) for each in (name, script))
    raise TestNotRun(
        f"the test ended with exit code {exit_code}: {NOT_RUN[exit_code]} ({said:.{LINE}})",
        tuple(path for path in named if path in finished.brought),
    )


async def spoilt(finished: Finished, error: TestNotRun) -> Verdict | None:
    """Return the verdict of a test that did not run because the agent removed or changed a file of the task;
    None if the files are as the task brought them.
    """
    for path in error.files:
        given = finished.brought[path]
        was = (given.text or "").encode() if given.base64 is None else b64decode(given.base64)
        there = await content(finished.runtime, path, limit=len(was) + 1)
        runs = await finished.runtime.run(["test", "-x", path]) if given.mode & 0o111 else None
        if there != was or (runs is not None and runs.exit_code != 0):
            why = f"the test ran {path:.{NAME}}, which the agent removed or changed"
            return Verdict(reward=0.0, metrics={"reason": why})
    return None


def _config_programs(finished: Finished) -> list[str]:
    """The paths of programs that a test's own config runs."""
    script, argv = finished.config.get("script"), finished.config.get("argv")
    if isinstance(script, str):
        return RUN_PATH.findall(script)
    return [str(argv[0])] if isinstance(argv, Sequence) and argv and "/" in str(argv[0]) else []


def _belongs_to_agent(finished: Finished, program: str) -> bool:
    """Whether a program is in the workdir and was not brought by the task."""
    workdir = finished.runtime.workdir
    path = normpath(codec.in_workdir(program, workdir))
    return path.startswith(f"{workdir.rstrip('/')}/") and path not in finished.brought


async def content(runtime: Runtime, path: str, *, limit: int) -> bytes | None:
    """Read a plain file of the agent's; None if there is none, or if the agent made one that cannot be
    read.
    """
    try:
        return await runtime.read(path, limit=limit)
    except ContentFault:
        return None


def stderr_tail(output: bytes) -> str:
    """The end of a program's output, for an error message."""
    return output.decode("utf-8", "replace").strip()[-500:]
