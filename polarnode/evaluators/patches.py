"""The patch of what an agent left: taken out of its container, put onto a clean one.

Nothing of the agent's git is asked but its objects. A repository of our own beside the worktree has no config, hooks, filters, index or
excludes that an agent could have set; the base is the clean runtime's worktree, so that a patch holds what the agent did and not what its
image had lying about. Committed, staged, untracked, deleted, binary, in a submodule or in a repository of the agent's own: all of it is in.
The rule for whoever edits it: what an agent can break is `Unusable`, its reward; what a task or machine has wrong is an EvaluatorError.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath

from attrs import field, frozen

from polarnode.conversation import Json
from polarnode.errors import EvaluatorError
from polarnode.evaluators import patch_sections
from polarnode.evaluators.patch_scripts import APPLY, EXTRACT, FOLDERS, KEPT_OUT, NO_BASE, NO_REPOSITORY, TOO_LARGE, TREE
from polarnode.evaluators.running import last_words
from polarnode.ports import Ended, Runtime

PATCH_BYTES = 16 << 20  # a patch is read by people and diffs of a rewritten repository are a few MB; half of what a runtime keeps of an output
FILE_BYTES = 8 << 20  # an untracked file larger than this is no work on a source tree: a core dump, a download
PATCH_SHOWN = 16_000  # characters of a patch kept in metrics: nine tenths of accepted ones are shorter
TIMED_OUT = 124

# What running tests leaves. Patterns match whole paths and * matches /, as in Polar.
LEFTOVERS = ("__pycache__/*", "*/__pycache__/*", "*.pyc", "*.pyo", ".pytest_cache/*", "*/.pytest_cache/*")


@frozen(kw_only=True)
class Repository:
    """Where the work is, and what of it counts. `base` None: the commit a clean runtime has. `command`: a patch of the task's own making."""

    folder: str
    base: str | None = None
    user: str | None = None
    command: str | None = None
    exclude: tuple[str, ...] = ()
    within_s: float = 300.0


@frozen(kw_only=True)
class Patch:
    """What an agent did. `notes` say what was left out."""

    content: bytes
    notes: tuple[str, ...] = ()
    applied_by: str | None = None
    paths: tuple[str, ...] = field(init=False)

    @paths.default
    def _paths(self) -> tuple[str, ...]:
        return patch_sections.paths(self.content)

    @property
    def metrics(self) -> dict[str, Json]:
        """What is kept of it with a verdict."""
        shown = self.content[:PATCH_SHOWN].decode("utf-8", "replace")
        told: dict[str, Json] = {"bytes": len(self.content), "files": len(self.paths), "text": shown}
        return {**told, **({"notes": list(self.notes)} if self.notes else {}), **({"applied_by": self.applied_by} if self.applied_by else {})}


@frozen(kw_only=True)
class Unusable:
    """Why what an agent left gives no patch. It is worth nothing, and the sentence says why."""

    reason: str


async def extract(left: Runtime, clean: Runtime, of: Repository) -> Patch | Unusable:
    """What differs between the clean runtime's worktree and the one the agent left."""
    if of.command is not None:
        return await _commanded(left, of, of.command)
    base = await _base(clean, of)
    start = await _run(clean, of, base, b"")
    if start.exit_code != 0 or len(start.stdout) > PATCH_BYTES:
        raise EvaluatorError(f"the image's own repository can not be read: {_said(start, of, base)}")
    ended = await _run(left, of, base, start.stdout)
    if ended.exit_code != 0 or len(ended.stdout) > PATCH_BYTES:
        return Unusable(reason=f"what the agent left gives no patch: {_said(ended, of, base)}")
    return _usable(Patch(content=ended.stdout, notes=_notes(ended)))


async def apply(clean: Runtime, patch: Patch, of: Repository) -> Patch | Unusable:
    """Put the patch onto the clean runtime's repository; git first, then patch(1) as Polar does. What is excluded must be as it was."""
    ended = await clean.run(_argv(APPLY, of, of.folder, *of.exclude), user=of.user, workdir="/", stdin=patch.content)
    if ended.exit_code != 0:
        return Unusable(reason=f"the patch does not apply to a clean {of.folder}: {last_words(ended.stderr + ended.stdout)}")
    return Patch(content=patch.content, notes=patch.notes, applied_by=last_words(ended.stdout).splitlines()[-1])


async def no_folders(clean: Runtime, of: Repository, paths: Sequence[str]) -> tuple[str, ...]:
    """Which folders above these files are none in the repository: a link there leads whoever writes the files somewhere else."""
    above = sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."})
    ended = await clean.run(_argv(FOLDERS, of, of.folder, *above), user=of.user, workdir="/")
    return tuple(ended.stdout.decode("utf-8", "surrogateescape").splitlines())


async def moved(left: Runtime, clean: Runtime, of: Repository) -> Patch | Unusable:
    """What the agent did, done on the clean runtime."""
    found = await extract(left, clean, of)
    return found if isinstance(found, Unusable) else await apply(clean, found, of)


async def _commanded(left: Runtime, of: Repository, command: str) -> Patch | Unusable:
    """The task's own command, in the agent's container and with its git: what Polar does."""
    ended = await left.run(_argv(KEPT_OUT, of, of.folder, command, f"{PATCH_BYTES + 1}"), user=of.user, workdir="/")
    if ended.exit_code != 0:
        return Unusable(reason=f"the patch command ended with exit code {ended.exit_code}: {last_words(ended.stderr)}")
    if len(ended.stdout) > PATCH_BYTES:
        return Unusable(reason=f"the patch command gave {TOO_LARGE.format(PATCH_BYTES >> 20)}")
    return _usable(Patch(content=patch_sections.without(ended.stdout, (*LEFTOVERS, *of.exclude)), notes=_notes(ended)))


def _usable(patch: Patch) -> Patch | Unusable:
    if patch.content.strip():
        return patch
    return Unusable(reason="; ".join(["the agent changed nothing", *patch.notes]))


async def _base(clean: Runtime, of: Repository) -> str:
    """The tree that the work began at, as the image knows it."""
    ended = await clean.run(_argv(TREE, of, of.folder, of.base or "HEAD"), user=of.user, workdir="/")
    if ended.exit_code == 4:
        raise EvaluatorError(f"the image and the task do not fit: {NO_BASE.format(of.folder, of.base)}")
    if ended.exit_code != 0:
        raise EvaluatorError(f"{of.folder} is no git repository with a commit in the image, name the right repo_dir: {last_words(ended.stderr)}")
    return ended.stdout.decode("ascii", "replace").strip()


async def _run(runtime: Runtime, of: Repository, base: str, start: bytes) -> Ended:
    excluded = [f":(exclude){pattern}" for pattern in (*LEFTOVERS, *of.exclude)]
    argv = _argv(EXTRACT, of, of.folder, base, f"{PATCH_BYTES}", f"{FILE_BYTES >> 10}", *excluded)
    return await runtime.run(argv, user=of.user, workdir="/", stdin=start)


def _argv(script: str, of: Repository, *arguments: str) -> Sequence[str]:
    within = 'if command -v timeout >/dev/null 2>&1; then exec timeout -k 5 "$0" sh -c "$@"; fi; exec sh -c "$@"'
    return ["sh", "-c", within, f"{of.within_s:g}", script, "sh", *arguments]


def _said(ended: Ended, of: Repository, base: str) -> str:
    if len(ended.stdout) > PATCH_BYTES:
        return TOO_LARGE.format(PATCH_BYTES >> 20)
    match ended.exit_code:
        case 3:
            return NO_REPOSITORY.format(of.folder)
        case 4:
            return NO_BASE.format(of.folder, base)
        case code if code == TIMED_OUT:
            return f"it took longer than {of.within_s:g} s"
        case code:
            return f"exit code {code}, {last_words(ended.stderr) or 'nothing said'}"


def _notes(ended: Ended) -> tuple[str, ...]:
    """What the script left out, and what git said of files it could not read."""
    lines = ended.stderr.decode("utf-8", "replace").splitlines()
    return tuple(line[:200] for line in lines if not line.startswith(("warning: in the working copy", "hint:")))[-20:]
