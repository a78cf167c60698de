"""The agent's work as a patch, which is extracted from its container and applied to a clean runtime.

The scripts run in any image with git, sh and the usual tools. They exit with 3 if there is no repository,
with 4 if the base does not exist, and otherwise with git's own code. Only objects are read from the agent's
git: a separate repository beside the worktree ignores the config, hooks, filters, index and excludes that an
agent could have set. The base is the clean runtime's worktree, so the patch holds all changes of the agent
and nothing of the image: committed, staged, untracked, deleted and binary files, also in submodules and
nested repositories. Patches are parsed as bytes, because file names need not be text.

Invariants: every git setting of the machine, the image and the agent is off. What an agent can break gives
`UnusablePatch`, which means a reward of 0; a fault of the task or the machine is an EvaluatorError.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from attrs import field, frozen

from polarnode.core.conversation import Json
from polarnode.core.errors import EvaluatorError
from polarnode.core.ports import NOT_RUN, Ended, Runtime
from polarnode.evaluators.contract import Finished, stderr_tail

# ── scripts ────────────────────────────────────────────────────────────────────

NO_REPOSITORY = "{} is no git repository"
NO_BASE = "the repository at {} does not hold the base {}"
TOO_LARGE = "more than {} MiB: name what does not belong to it in exclude_patterns"

# Sets a clean environment for git: no GIT_ variable from the image, one config file of ours, and no prompt.
_CLEAN_GIT = """
set -u
for name in $(env | sed -n 's/^\\(GIT_[A-Za-z0-9_]*\\)=.*/\\1/p'); do unset "$name"; done
tmp=$(mktemp -d /tmp/polarnode-patch.XXXXXX) || exit 6
trap 'rm -rf "$tmp"' EXIT
export LC_ALL=C HOME="$tmp" XDG_CONFIG_HOME="$tmp" GIT_CONFIG_NOSYSTEM=1
export GIT_CONFIG_GLOBAL="$tmp/.gitconfig" GIT_TERMINAL_PROMPT=0
{
  printf '[safe]\\n\\tdirectory = *\\n[core]\\n\\tcompression = 1\\n'
  printf '\\thooksPath = /dev/null\\n\\tfsmonitor = false\\n'
} > "$tmp/.gitconfig"
"""

# Makes a separate repository for the agent's worktree. Files are read and written byte for byte, whatever
# .gitattributes says: no line-ending, encoding or filter conversion applies to extraction or application.
_OWN = """
GIT_WORK_TREE=$(pwd -P)
export GIT_DIR="$tmp/git" GIT_WORK_TREE GIT_INDEX_FILE="$tmp/index"
git init --quiet --template= --object-format="$format" >/dev/null 2>&1 ||
  git init --quiet --template= >/dev/null || exit 6
mkdir -p "$GIT_DIR/info"
echo '* -text -ident !filter !working-tree-encoding !diff' > "$GIT_DIR/info/attributes"
"""

# $1: folder, $2: commit. Prints the commit's tree id, because a repository that the task itself creates has
# a different commit id in each container.
TREE = (
    _CLEAN_GIT
    + """
cd "$1" || exit 3
git rev-parse --verify HEAD >/dev/null || exit 3
git rev-parse --verify --quiet "$2^{tree}" || exit 4
"""
)

# $1: folder, $2: tree of the base, $3: limit of the patch in bytes, $4: limit of an untracked file in KiB,
# then pathspecs. stdin: the patch from the base to the start.
EXTRACT_SCRIPT = (
    _CLEAN_GIT
    + """
cat > "$tmp/start"
cd "$1" 2>/dev/null || exit 3
base=$2 most=$3 largest=$4; shift 4

# Where a repository keeps its objects, found without asking its config: .git is a folder, or a file that
# names one.
objects() {
  g=$1
  [ -L "$g" ] && return 1
  if [ -f "$g" ]; then
    g=$(sed -n 's/^gitdir: //p' "$g")
    case $g in /*) ;; *) g=$(dirname "$1")/$g ;; esac
  fi
  if [ -f "$g/commondir" ]; then
    common=$(cat "$g/commondir")
    case $common in /*) g=$common ;; *) g=$g/$common ;; esac
  fi
  [ -d "$g/objects" ] && (cd "$g/objects" && pwd -P)
}
borrow() { found=$(objects "$1") || return 1; printf '%s\\n' "$found" >> "$GIT_DIR/objects/info/alternates"; }

format=sha1; [ ${#base} -eq 64 ] && format=sha256
"""
    + _OWN
    + """
borrow "$GIT_WORK_TREE/.git" || exit 3
git cat-file -e "$base^{tree}" 2>/dev/null || exit 4

# The start: the base, its submodules as the folders they are, and what the image had beside them.
git read-tree "$base" || exit 4
links() { git ls-files --stage | sed -n 's/^160000 \\([0-9a-f]*\\) 0\\t/\\1 /p'; }
for deep in 1 2 3 4; do
  links > "$tmp/links"
  [ -s "$tmp/links" ] || break
  while IFS= read -r line; do
    commit=${line%% *} path=${line#* }
    git update-index --force-remove -- "$path"
    if borrow "$GIT_WORK_TREE/$path/.git" && git cat-file -e "$commit^{commit}" 2>/dev/null; then
      git read-tree --prefix="$path/" "$commit"
    fi
  done < "$tmp/links"
done
if [ -s "$tmp/start" ]; then git apply --cached --binary --whitespace=nowarn "$tmp/start" || exit 7; fi
began=$(git write-tree) || exit 7

# What is too large to be work, by path, as a line of our own info/exclude.
find . -path ./.git -prune -o -type f -size +"${largest}k" -print | while IFS= read -r path; do
  git ls-files --error-unmatch -- ":(literal)${path#./}" >/dev/null 2>&1 && continue
  git check-ignore --quiet -- "$path" 2>/dev/null && continue
  printf '%s\\n' "${path#.}" | sed 's/[][*?\\\\ ]/\\\\&/g' >> "$GIT_DIR/info/exclude"
  echo "left out, larger than $largest KiB: ${path#./}" >&2
done

# A repository inside this one is a folder like any other once the index has something in it.
find . -mindepth 2 -name .git -prune -print | while IFS= read -r path; do
  folder=${path#./}; folder=${folder%/.git}
  [ -n "$(git ls-files -- ":(literal)$folder" | head -n 1)" ] && continue
  first=$(find "./$folder" -name .git -prune -o \\( -type f -o -type l \\) -print | head -n 1)
  if [ -n "$first" ]; then git update-index --add -- "${first#./}"
  else printf '/%s\\n' "$folder" | sed 's/[][*?\\\\ ]/\\\\&/g' >> "$GIT_DIR/info/exclude"; fi
done
git add --all --ignore-errors . 2>"$tmp/errors" || tail -n 20 "$tmp/errors" >&2
links | while IFS= read -r line; do git update-index --force-remove -- "${line#* }"; done
ended=$(git write-tree) || exit 8

# Larger than it may be, a file of this shell's ends its writer; what was written by then is more than $most
# in every shell's units.
(ulimit -f $((most / 512 + 2));
  exec git diff-tree -r -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \\
  "$began" "$ended" -- . "$@") > "$tmp/patch" 2>"$tmp/errors"
code=$?
if [ "$code" -ne 0 ] && [ "$(wc -c < "$tmp/patch")" -le "$most" ]; then
  tail -n 5 "$tmp/errors" >&2
  exit 9
fi
head -c "$((most + 1))" "$tmp/patch"
"""
)

# $1: folder, then pathspecs that the patch may not touch. stdin: the patch. The last printed line names the
# program that applied it. The protected paths are compared before and after, because the patch comes from the
# agent's container: its effect can be trusted, its headers cannot.
APPLY_SCRIPT = (
    _CLEAN_GIT
    + """
cat > "$tmp/patch"
cd "$1" || exit 3
shift
format=sha1
kept_out() {
  [ $# -eq 0 ] || (
"""
    + _OWN
    + """
    rm -f "$GIT_INDEX_FILE"
    git ls-files -z --others -- "$@" | grep -zv '/$' | git update-index -z --add --stdin
    git write-tree
  ) 2>&1
}
before=$(kept_out "$@")
own() {
"""
    + _OWN
    + """
  git apply --binary --whitespace=nowarn "$tmp/patch"
}
if (own) 2>"$tmp/errors"; then by=git
elif git apply --binary --whitespace=nowarn "$tmp/patch"; then
  by=git  # a patch that git made with the repository's attributes
elif patch --batch --forward --fuzz=5 -p1 -i "$tmp/patch"; then by=patch
else exit 1; fi
if [ "$before" != "$(kept_out "$@")" ]; then
  echo "it changes what is not the agent's to change" >&2
  exit 5
fi
echo "$by"
"""
)

# $1: folder, then paths in it. Prints those that exist and are not folders.
NOT_FOLDERS_SCRIPT = """
cd "$1" || exit 3
shift
for path in "$@"; do
  if [ -L "$path" ] || { [ -e "$path" ] && [ ! -d "$path" ]; }; then printf '%s\\n' "$path"; fi
done
"""

# $1: folder, $2: command, $3: limit in bytes. Prints the command's output up to the limit; exits with its
# code.
CAPPED_COMMAND_SCRIPT = """
set -u
cd "$1" || exit 3
tmp=$(mktemp -d /tmp/polarnode-patch.XXXXXX) || exit 6
trap 'rm -rf "$tmp"' EXIT
shell=sh; command -v bash >/dev/null 2>&1 && shell=bash
"$shell" -c "$2" > "$tmp/patch"; code=$?
head -c "$3" "$tmp/patch"
exit "$code"
"""


# ── parsing ────────────────────────────────────────────────────────────────────

FILE_HEADER = b"diff --git "
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPED_BYTE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPE_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def sections(patch: bytes) -> Iterator[tuple[str | None, bytes]]:
    """Yield each file's path and its part of the patch. Text before the first file comes first, with path
    None.
    """
    path: str | None = None
    lines: list[bytes] = []
    for line in _lines(patch):
        if line.startswith(FILE_HEADER):
            if lines:
                yield path, b"".join(lines)
            path, lines = _path(line), []
        lines.append(line)
    if lines:
        yield path, b"".join(lines)


def paths(patch: bytes) -> tuple[str, ...]:
    """The paths of the files a patch touches, in the patch's order."""
    return tuple(path for path, _ in sections(patch) if path is not None)


def without(patch: bytes, patterns: Sequence[str]) -> bytes:
    """Drop every file whose path matches one of the patterns (`*` matches `/` too) and every file inside a
    .git folder.
    """
    return b"".join(
        section
        for path, section in sections(patch)
        if path is None
        or (".git" not in path.split("/") and not any(fnmatchcase(path, pattern) for pattern in patterns))
    )


def _lines(patch: bytes) -> list[bytes]:
    """Split at line feeds only: a carriage return belongs to the file's content."""
    *whole, last = patch.split(b"\n")
    return [line + b"\n" for line in whole] + ([last] if last else [])


def _path(line: bytes) -> str:
    """The second name in `diff --git a/x b/x`. Bytes that are not UTF-8 become surrogates, as in Python's
    file names.
    """
    names = line.rstrip(b"\r\n").removeprefix(FILE_HEADER)
    quoted = _QUOTED.findall(names)
    if quoted:
        name = _unquote_name(quoted[-1]) if names.endswith(b'"') else names.rpartition(b" ")[2]
    else:
        # Both names are equal apart from a/ and b/, so the line splits in half even if they contain spaces.
        half = names[(len(names) + 1) // 2 :]
        name = (
            half
            if half.startswith(b"b/") and names[: len(names) // 2][2:] == half[2:]
            else names.rpartition(b" ")[2]
        )
    return name.removeprefix(b"b/").decode("utf-8", "surrogateescape")


def _unquote_name(name: bytes) -> bytes:
    def plain(found: re.Match[bytes]) -> bytes:
        escaped = found[1]
        return bytes([int(escaped, 8) & 0xFF]) if len(escaped) == 3 else _ESCAPE_LETTERS.get(escaped, escaped)

    return _ESCAPED_BYTE.sub(plain, name)


# ── extract and apply ──────────────────────────────────────────────────────────

# The largest patch. The diff of a rewritten repository is a few MB; this is half of the output that a runtime
# keeps.
MAX_PATCH_BYTES = 16 << 20
# A larger untracked file is not source code but, for example, a core dump or a download.
FILE_BYTES = 8 << 20
PATCH_SHOWN = 16_000  # characters of a patch kept in metrics; 90 % of accepted patches are shorter
TIMED_OUT = 124

# Files that a test run leaves. Patterns match whole paths and * matches /, as in Polar.
LEFTOVER_PATTERNS = (
    "__pycache__/*",
    "*/__pycache__/*",
    "*.pyc",
    "*.pyo",
    ".pytest_cache/*",
    "*/.pytest_cache/*",
)


@frozen(kw_only=True)
class Repository:
    """The repository that holds the agent's work, and which of its files count.

    `base` is a commit; None means HEAD of the clean runtime. `command`, if set, is run in the agent's
    container and prints the patch.
    """

    folder: str
    base: str | None = None
    user: str | None = None
    command: str | None = None
    exclude: tuple[str, ...] = ()
    within_s: float = 300.0


@frozen(kw_only=True)
class Patch:
    """The agent's changes. `notes` lists what was left out and why."""

    content: bytes
    notes: tuple[str, ...] = ()
    applied_by: str | None = None
    paths: tuple[str, ...] = field(init=False)

    @paths.default
    def _paths(self) -> tuple[str, ...]:
        return paths(self.content)

    @property
    def metrics(self) -> dict[str, Json]:
        """The part of the patch that is stored with the verdict."""
        shown = self.content[:PATCH_SHOWN].decode("utf-8", "replace")
        metrics: dict[str, Json] = {"bytes": len(self.content), "files": len(self.paths), "text": shown}
        return {
            **metrics,
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"applied_by": self.applied_by} if self.applied_by else {}),
        }


@frozen(kw_only=True)
class UnusablePatch:
    """The agent's container gives no usable patch; the reward is zero and `reason` says why."""

    reason: str


async def extract(agent: Runtime, clean: Runtime, of: Repository) -> Patch | UnusablePatch:
    """The difference between the clean runtime's worktree and the agent's, as a patch."""
    if of.command is not None:
        return await _run_patch_command(agent, of, of.command)
    base = await _base_tree(clean, of)
    start = await _run(clean, of, base, b"")
    if start.exit_code != 0 or len(start.stdout) > MAX_PATCH_BYTES:
        raise EvaluatorError(f"the image's own repository cannot be read: {_failure(start, of, base)}")
    ended = await _run(agent, of, base, start.stdout)
    if ended.exit_code != 0 or len(ended.stdout) > MAX_PATCH_BYTES:
        return UnusablePatch(reason=f"what the agent left gives no patch: {_failure(ended, of, base)}")
    return _usable(Patch(content=ended.stdout, notes=_notes(ended)))


async def apply(clean: Runtime, patch: Patch, of: Repository) -> Patch | UnusablePatch:
    """Apply the patch to the clean runtime's repository, with git first and then with patch(1), as Polar
    does. A patch that changes an excluded path is Unusable.
    """
    ended = await clean.run(
        _script_argv(APPLY_SCRIPT, of, of.folder, *of.exclude), user=of.user, workdir="/", stdin=patch.content
    )
    if ended.exit_code != 0:
        return UnusablePatch(
            reason=(
                f"the patch does not apply to a clean {of.folder}: {stderr_tail(ended.stderr + ended.stdout)}"
            )
        )
    return Patch(
        content=patch.content, notes=patch.notes, applied_by=stderr_tail(ended.stdout).splitlines()[-1]
    )


async def paths_not_folders(clean: Runtime, of: Repository, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the parents of these paths that exist in the repository and are not folders. A link among them
    would redirect the files that are written below it.
    """
    above = sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."})
    ended = await clean.run(
        _script_argv(NOT_FOLDERS_SCRIPT, of, of.folder, *above), user=of.user, workdir="/"
    )
    return tuple(ended.stdout.decode("utf-8", "surrogateescape").splitlines())


async def moved(agent: Runtime, clean: Runtime, of: Repository) -> Patch | UnusablePatch:
    """Extract the agent's patch and apply it to the clean runtime."""
    found = await extract(agent, clean, of)
    return found if isinstance(found, UnusablePatch) else await apply(clean, found, of)


async def carried(finished: Finished, of: Repository) -> Patch | UnusablePatch:
    """Move the agent's work to the runtime in which it is judged. If the session's repository was not kept,
    the patch of its first evaluation is applied.
    """
    kept = finished.kept
    if kept is None or (kept.folder and PurePosixPath(of.folder).is_relative_to(kept.folder)):
        return await moved(finished.left, finished.runtime, of)
    if kept.patch is None:
        raise EvaluatorError(
            f"{of.folder} of the session was not kept, nor its whole patch: set runtime.keep_workspace, with"
            f" {of.folder} in runtime.workdir"
        )
    found = _usable(Patch(content=without(kept.patch, (*LEFTOVER_PATTERNS, *of.exclude))))
    return found if isinstance(found, UnusablePatch) else await apply(finished.runtime, found, of)


async def _run_patch_command(agent: Runtime, of: Repository, command: str) -> Patch | UnusablePatch:
    """Run the task's own patch command in the agent's container, with its git, as Polar does."""
    ended = await agent.run(
        _script_argv(CAPPED_COMMAND_SCRIPT, of, of.folder, command, f"{MAX_PATCH_BYTES + 1}"),
        user=of.user,
        workdir="/",
    )
    if ended.exit_code in NOT_RUN:  # the agent cannot change the root, where programs are
        raise EvaluatorError(
            f"the patch command ended with exit code {ended.exit_code}: {NOT_RUN[ended.exit_code]}"
            f" ({stderr_tail(ended.stderr)})"
        )
    if ended.exit_code != 0:
        return UnusablePatch(
            reason=f"the patch command ended with exit code {ended.exit_code}: {stderr_tail(ended.stderr)}"
        )
    if len(ended.stdout) > MAX_PATCH_BYTES:
        return UnusablePatch(reason=f"the patch command gave {TOO_LARGE.format(MAX_PATCH_BYTES >> 20)}")
    return _usable(
        Patch(content=without(ended.stdout, (*LEFTOVER_PATTERNS, *of.exclude)), notes=_notes(ended))
    )


def _usable(patch: Patch) -> Patch | UnusablePatch:
    if patch.content.strip():
        return patch
    return UnusablePatch(reason="; ".join(["the agent changed nothing", *patch.notes]))


async def _base_tree(clean: Runtime, of: Repository) -> str:
    """The id of the base commit's tree in the clean runtime."""
    ended = await clean.run(_script_argv(TREE, of, of.folder, of.base or "HEAD"), user=of.user, workdir="/")
    if ended.exit_code == 4:
        raise EvaluatorError(f"the image and the task do not fit: {NO_BASE.format(of.folder, of.base)}")
    if ended.exit_code != 0:
        raise EvaluatorError(
            f"{of.folder} is no git repository with a commit in the image, name the right repo_dir:"
            f" {stderr_tail(ended.stderr)}"
        )
    return ended.stdout.decode("ascii", "replace").strip()


async def _run(runtime: Runtime, of: Repository, base: str, start: bytes) -> Ended:
    excluded = [f":(exclude){pattern}" for pattern in (*LEFTOVER_PATTERNS, *of.exclude)]
    argv = _script_argv(
        EXTRACT_SCRIPT, of, of.folder, base, f"{MAX_PATCH_BYTES}", f"{FILE_BYTES >> 10}", *excluded
    )
    return await runtime.run(argv, user=of.user, workdir="/", stdin=start)


def _script_argv(script: str, of: Repository, *arguments: str) -> Sequence[str]:
    within = (
        'if command -v timeout >/dev/null 2>&1; then exec timeout -k 5 "$0" sh -c "$@"; fi; exec sh -c "$@"'
    )
    return ["sh", "-c", within, f"{of.within_s:g}", script, "sh", *arguments]


def _failure(ended: Ended, of: Repository, base: str) -> str:
    if len(ended.stdout) > MAX_PATCH_BYTES:
        return TOO_LARGE.format(MAX_PATCH_BYTES >> 20)
    match ended.exit_code:
        case 3:
            return NO_REPOSITORY.format(of.folder)
        case 4:
            return NO_BASE.format(of.folder, base)
        case code if code == TIMED_OUT:
            return f"it took longer than {of.within_s:g} s"
        case code:
            return f"exit code {code}, {stderr_tail(ended.stderr) or 'nothing said'}"


def _notes(ended: Ended) -> tuple[str, ...]:
    """The files the script left out, and git's messages about files it could not read."""
    lines = ended.stderr.decode("utf-8", "replace").splitlines()
    return tuple(
        line[:200] for line in lines if not line.startswith(("warning: in the working copy", "hint:"))
    )[-20:]
