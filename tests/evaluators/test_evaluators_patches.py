"""The patch of what an agent left, by real git: all of its work is in, nothing of its git is asked, and what
it broke is a sentence.
"""

import os
from pathlib import Path

import pytest
from attrs import evolve
from evaluators_kit import AgentWorkplace, copied, finished, make_workplace
from hypothesis import given, settings
from hypothesis import strategies as st
from shell_runtime import TESTBED_PATH, ShellRuntime, git

from polarnode.core.errors import EvaluatorError
from polarnode.evaluators import patches
from polarnode.evaluators.contract import KeptWork
from polarnode.evaluators.patches import Patch, Repository, UnusablePatch, apply, moved
from polarnode.rollouts.session_containers import Gone


@pytest.fixture
def place(tmp_path: Path) -> AgentWorkplace:
    return make_workplace(tmp_path)


# ── what is in it ─────────────────────────────────────────────────────────────


async def test_every_file_change_arrives(place: AgentWorkplace) -> None:
    left = place.left
    (left / "a.py").write_bytes(b"a = 2\r\nno end of line")
    (left / "deep/b.py").unlink()
    (left / "new folder").mkdir()
    (left / 'new folder/ümlaut \t"quoted".txt').write_bytes(b"text\n")
    (left / "blob.bin").write_bytes(os.urandom(5000) + b"\0")
    (left / "empty.txt").write_bytes(b"")
    (left / "run.sh").write_bytes(b"#!/bin/sh\n")
    (left / "run.sh").chmod(0o755)
    (left / "link").symlink_to("deep")
    (left / "outside").symlink_to("/etc/passwd")
    await place.carried()
    assert place.differ() == []
    assert (place.clean / "outside").is_symlink(), "a link stays a link"


async def test_committed_staged_unstaged_are_equal(place: AgentWorkplace) -> None:
    """Committed, staged and unstaged changes are all one patch."""
    (place.left / "committed.py").write_text("1\n")
    git(place.left, "checkout", "--quiet", "-b", "fix")
    git(place.left, "add", "--all")
    git(place.left, "commit", "--quiet", "--message", "mine")
    (place.left / "staged.py").write_text("2\n")
    git(place.left, "add", "staged.py")
    (place.left / "written.py").write_text("3\n")
    found = await place.carried()
    assert found.paths == ("committed.py", "staged.py", "written.py")
    assert place.differ() == []
    assert git(place.left, "status", "--porcelain").split() == [
        "A",
        "staged.py",
        "??",
        "written.py",
    ], "the agent's own index is as it was"


async def test_undecodable_file_names_arrive(place: AgentWorkplace) -> None:
    (place.left / os.fsdecode(b"caf\xe9 \xff")).write_text("odd\n")
    found = await place.carried()
    assert [os.fsencode(path) for path in found.paths] == [b"caf\xe9 \xff"]
    assert place.differ() == []


async def test_mode_change_alone_is_work(place: AgentWorkplace) -> None:
    (place.left / "a.py").chmod(0o755)
    found = await place.carried()
    assert b"new mode 100755" in found.content
    assert place.differ() == []


async def test_image_leftovers_are_no_work(tmp_path: Path) -> None:
    """Files that lay about in the image are no work of the agent."""
    made = make_workplace(tmp_path)
    (made.clean / "a.py").write_text("a = 'set by the image'\n")
    (made.clean / "built.so").write_bytes(b"\0elf")
    (made.left / "a.py").unlink()
    for path in sorted(made.left.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    made.left.rmdir()
    place = copied(made.clean)
    (place.left / "a.py").write_text("a = 'set by the image'\nb = 2\n")
    found = await place.carried()
    assert found.paths == ("a.py",)
    assert b"-a" not in found.content
    assert b"+b = 2" in found.content
    assert place.differ() == []


async def test_older_base_commit_excludes_image_commit(
    place: AgentWorkplace,
) -> None:
    """SWE-bench's images have a commit of their own on top of the instance's."""
    base = git(place.clean, "rev-parse", "HEAD")
    for folder in (place.clean, place.left):
        (folder / "setup.cfg").write_text("patched by the image\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", "the image's")
    (place.left / "a.py").write_text("a = 2\n")
    assert (await place.carried(base=base)).paths == ("a.py",)
    assert place.differ() == []


async def test_recreated_repository_is_still_compared(place: AgentWorkplace) -> None:
    """By the task's own prepare steps, at another time: its commits have other names."""
    (place.left / ".git").rename(place.left.parent / "aside")
    git(place.left, "init", "--quiet")
    git(place.left, "add", "--all")
    git(place.left, "commit", "--quiet", "--message", "at another time", "--date", "2001-01-01T00:00:00Z")
    assert git(place.left, "rev-parse", "HEAD") != git(place.clean, "rev-parse", "HEAD")
    (place.left / "a.py").write_text("a = 2\n")
    assert (await place.carried()).paths == ("a.py",)


async def test_leftovers_and_ignored_files_excluded(place: AgentWorkplace) -> None:
    for name in (
        "__pycache__/x.txt",
        "deep/__pycache__/y.txt",
        "mod.pyc",
        ".pytest_cache/v",
        "ignored/z",
        "run.log",
        "notes/plan.md",
        "a.py",
    ):
        (place.left / name).parent.mkdir(exist_ok=True)
        (place.left / name).write_text("left\n")
    found = await place.patch(exclude=("notes/*",))
    assert isinstance(found, Patch)
    assert found.paths == ("a.py",)


# ── repositories inside ───────────────────────────────────────────────────────


async def test_submodule_work_arrives(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").write_text("one = 1\n")
    git(library, "init", "--quiet")
    git(library, "add", "--all")
    git(library, "commit", "--quiet", "--message", "library")
    made = make_workplace(tmp_path)
    git(made.clean, "submodule", "--quiet", "add", str(library), "vendor/lib")
    git(made.clean, "commit", "--quiet", "--message", "with a library")
    place = copied_again(made)
    (place.left / "vendor/lib/lib.py").write_text("one = 2\n")
    git(place.left / "vendor/lib", "commit", "--quiet", "--all", "--message", "mine")
    (place.left / "vendor/lib/more.py").write_text("new\n")
    found = await place.carried()
    assert found.paths == ("vendor/lib/lib.py", "vendor/lib/more.py")
    assert place.differ() == []


def copied_again(made: AgentWorkplace) -> AgentWorkplace:
    made.left.rename(made.left.with_name("older"))
    return copied(made.clean)


@pytest.mark.parametrize("commits", [True, False])
async def test_inner_repository_becomes_folder(place: AgentWorkplace, commits: bool) -> None:
    """A repository that the agent made inside is a folder of its work."""
    inner = place.left / "project"
    (inner / "src").mkdir(parents=True)
    git(inner, "init", "--quiet")
    (inner / "src/main.py").write_text("print()\n")
    if commits:
        git(inner, "add", "--all")
        git(inner, "commit", "--quiet", "--message", "inner")
    (inner / "later.py").write_text("later\n")
    (place.left / "nothing").mkdir()
    git(place.left / "nothing", "init", "--quiet")
    found = await place.carried()
    assert found.paths == ("project/later.py", "project/src/main.py")
    assert place.differ() == []


# ── an agent against it ───────────────────────────────────────────────────────


async def test_no_agent_git_program_runs(place: AgentWorkplace, tmp_path: Path) -> None:
    """No program of the agent's git is run."""
    trap = tmp_path / "sprung"
    program = tmp_path / "trap.sh"
    program.write_text(f"#!/bin/sh\necho $0 >> {trap}\ncat\n")
    program.chmod(0o755)
    left = place.left
    for name in (
        "core.fsmonitor",
        "diff.external",
        "filter.evil.clean",
        "filter.evil.process",
        "diff.evil.textconv",
        "diff.evil.command",
        "core.pager",
    ):
        git(left, "config", name, str(program))
    git(left, "config", "core.hooksPath", str(tmp_path / "hooks"))
    (tmp_path / "hooks").mkdir()
    for hook in ("pre-commit", "post-checkout", "post-index-change", "fsmonitor-watchman"):
        (tmp_path / "hooks" / hook).write_text(program.read_text())
        (tmp_path / "hooks" / hook).chmod(0o755)
    (left / ".gitattributes").write_text("*.py filter=evil diff=evil\n")
    (tmp_path / ".gitconfig").write_text(f"[core]\nfsmonitor = {program}\n")  # the agent's home
    (left / "a.py").write_text("a = 2\n")
    found = await place.carried()
    assert found.paths == (".gitattributes", "a.py")
    assert not trap.exists()
    assert place.differ() == []


@pytest.mark.parametrize(
    "setting",
    [
        ("diff.noprefix", "true"),
        ("diff.mnemonicPrefix", "true"),
        ("core.quotePath", "false"),
        ("diff.renames", "copies"),
        ("core.fileMode", "false"),
        ("core.autocrlf", "true"),
        ("core.bare", "true"),
        ("core.worktree", "/"),
        ("core.excludesFile", "/dev/stdin"),
        ("diff.ignoreSubmodules", "all"),
        ("core.attributesFile", "everything-binary"),
        ("color.ui", "always"),
        ("diff.context", "0"),
    ],
)
async def test_agent_git_settings_change_nothing(place: AgentWorkplace, setting: tuple[str, str]) -> None:
    plain = await place.patch()
    assert isinstance(plain, UnusablePatch)
    (place.left / "a.py").write_bytes(b"a = 2\r\n")
    (place.left / "deep/b.py").rename(place.left / "deep/c.py")
    before = await place.patch()
    git(place.left, "config", *setting)
    (place.left / ".git/info/exclude").write_text("*\n")
    assert await place.patch() == before
    assert isinstance(before, Patch)
    assert len(before.paths) == 3


async def test_image_variables_change_no_patch(place: AgentWorkplace) -> None:
    (place.left / "a.py").write_text("a = 2\n")
    (place.left / "deep/b.py").write_text("b = 2\n")
    names = {
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_DIR": "/nowhere",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "x",
    }
    left, clean = (ShellRuntime(folder=folder, image_env=names) for folder in (place.left, place.clean))
    of = Repository(folder=TESTBED_PATH, exclude=("deep/*",))
    done = await moved(left, clean, of)
    assert isinstance(done, Patch), done
    assert (done.paths, done.applied_by) == (("a.py",), "git")


async def test_inner_repository_commits_are_excluded(place: AgentWorkplace) -> None:
    inner = place.left / "inner"
    inner.mkdir()
    (inner / "two\nlines").write_text("x\n")
    git(inner, "init", "--quiet")
    git(inner, "add", "--all")
    git(inner, "commit", "--quiet", "--message", "inner")
    (place.left / "a.py").write_text("a = 2\n")
    found = await place.carried()
    assert found.paths == ("a.py",)


@pytest.mark.parametrize(
    "damage", ["[core\n", "[include]\npath = /dev/zero\n", "[extensions]\nobjectFormat = sha512\n"]
)
async def test_broken_git_config_is_harmless(place: AgentWorkplace, damage: str) -> None:
    (place.left / ".git/config").write_text(damage)
    (place.left / "a.py").write_text("a = 2\n")
    assert (await place.carried()).paths == ("a.py",)


@pytest.mark.parametrize("damage", ["gone", "file", "link", "loop", "objects", "again"])
async def test_damaged_repository_is_explained(place: AgentWorkplace, tmp_path: Path, damage: str) -> None:
    (place.left / "a.py").write_text("a = 2\n")
    kept = place.left / ".git"
    kept.rename(tmp_path / "aside")
    match damage:
        case "file":
            kept.write_text("no git\n")
        case "link":
            kept.symlink_to(tmp_path / "aside")
        case "loop":
            kept.symlink_to(".git")
        case "objects":
            (kept / "objects").mkdir(parents=True)
        case "again":
            git(place.left, "init", "--quiet")
            git(place.left, "add", "--all")
            git(place.left, "commit", "--quiet", "--message", "all new, the work in it")
    found = await place.patch()
    assert isinstance(found, UnusablePatch)
    assert "no git repository" in found.reason or "does not hold the base" in found.reason


async def test_moved_git_folder_is_followed(place: AgentWorkplace, tmp_path: Path) -> None:
    """A moved git folder and a worktree are followed."""
    (place.left / ".git").rename(tmp_path / "elsewhere")
    (place.left / ".git").write_text("gitdir: ../elsewhere\n")
    (place.left / "a.py").write_text("a = 2\n")
    assert (await place.carried()).paths == ("a.py",)


async def test_patch_size_is_bounded(place: AgentWorkplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch is bounded, and a dump stays out."""
    monkeypatch.setattr(patches, "MAX_PATCH_BYTES", 64 << 10)
    monkeypatch.setattr(patches, "FILE_BYTES", 32 << 10)
    (place.left / "core dump [1]").write_bytes(os.urandom(40 << 10))
    (place.left / "core").write_bytes(os.urandom(4 << 10))
    found = await place.patch()
    assert isinstance(found, Patch)
    assert found.paths == ("core",)
    assert found.notes == ("left out, larger than 32 KiB: core dump [1]",)
    for number in range(4):
        (place.left / f"part{number}").write_bytes(os.urandom(30 << 10))
    over = await place.patch()
    assert isinstance(over, UnusablePatch)
    assert "more than 0 MiB" in over.reason


@pytest.mark.parametrize(
    "attribute",
    [
        "working-tree-encoding=UTF-16",
        "text eol=crlf",
        "text=auto",
        "ident",
        "filter=lfs",
        "-diff",
        "export-subst",
    ],
)
async def test_attributes_do_not_change_bytes(tmp_path: Path, attribute: str) -> None:
    """The image's attributes, and the agent's: both sides of a patch are worktrees, and a worktree is
    bytes.
    """
    content = {
        ".gitattributes": f"odd* {attribute}\n".encode(),
        "odd.txt": b"\xff\xfea\0\n\0",
        "odd2.txt": b"$Id$\r\nx\r\n",
    }
    place = make_workplace(tmp_path, {"a.py": b"a = 1\r\n"})
    for folder in (place.clean, place.left):
        for name, text in content.items():
            (folder / name).write_bytes(text)
    (place.left / "odd2.txt").write_bytes(b"$Id: mine$\r\ny\n")
    (place.left / ".gitattributes").write_text(f"* {attribute}\n")
    (place.left / "a.py").write_bytes(b"a = 2\r\n")
    assert (await place.carried()).paths == (".gitattributes", "a.py", "odd2.txt")
    assert place.differ() == []


async def test_checkout_line_ends_are_no_work(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, {".gitattributes": b"*.bat text eol=crlf\n", "run.bat": b"one\ntwo\n"})
    for folder in (place.clean, place.left):
        (folder / "run.bat").unlink()
        git(folder, "checkout", "run.bat")
        assert (folder / "run.bat").read_bytes() == b"one\r\ntwo\r\n"
    assert await place.patch() == UnusablePatch(reason="the agent changed nothing")
    (place.left / "run.bat").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    await place.carried()
    assert place.differ() == []


async def test_polar_patch_with_crlf_applies(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, {".gitattributes": b"*.bat text eol=crlf\n", "run.bat": b"one\ntwo\n"})
    for folder in (place.clean, place.left):
        (folder / "run.bat").unlink()
        git(folder, "checkout", "run.bat")
    (place.left / "run.bat").write_bytes(b"one\r\nthree\r\n")
    await place.carried(command="git diff --binary --submodule=diff")
    assert place.differ() == []


async def test_no_change_is_reported(place: AgentWorkplace) -> None:
    assert await place.patch() == UnusablePatch(reason="the agent changed nothing")
    (place.left / "a.pyc").write_text("x")
    assert await place.patch() == UnusablePatch(reason="the agent changed nothing")


async def test_patch_time_is_bounded(place: AgentWorkplace) -> None:
    of = Repository(folder=TESTBED_PATH, within_s=1.0)
    os.mkfifo(place.left / ".git/objects/info/alternates")  # whoever reads it waits for ever
    ended = await patches._run(place.runtimes[0], of, git(place.clean, "rev-parse", "HEAD^{tree}"), b"")
    assert patches._failure(ended, of, "") == "it took longer than 1 s"


async def test_nothing_left_in_tmp(place: AgentWorkplace) -> None:
    (place.left / "a.py").write_text("a = 2\n")
    before = {name for name in os.listdir("/tmp") if name.startswith("polarnode-patch.")}
    await place.carried()
    assert {name for name in os.listdir("/tmp") if name.startswith("polarnode-patch.")} <= before


# ── a command of the task's own, and putting a patch on ───────────────────────


async def test_custom_patch_command_runs_unchanged(place: AgentWorkplace) -> None:
    (place.left / "a.py").write_text("a = 2\n")
    (place.left / "deep/b.py").write_text("b = 2\n")
    (place.left / "untracked.py").write_text("1\n")
    found = await place.patch(command="git diff --binary --submodule=diff", exclude=("deep/*",))
    assert isinstance(found, Patch)
    assert found.paths == ("a.py",), "what it does not say it does not get"
    assert await place.patch(command="echo sorry >&2; exit 3") == UnusablePatch(
        reason="the patch command ended with exit code 3: sorry"
    )


async def test_inexact_patch_applied_by_patch(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, {"a.py": b"1\n2\n3\nold\n5\n6\n7\n"})
    fuzzy = (
        b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,7 +1,7 @@\n one\n 2\n 3\n-old\n+new\n 5\n"
        b" 6\n seven\n"
    )
    done = await apply(place.runtimes[1], Patch(content=fuzzy), Repository(folder=TESTBED_PATH))
    assert isinstance(done, Patch)
    assert done.applied_by == "patch"
    assert (place.clean / "a.py").read_text() == "1\n2\n3\nnew\n5\n6\n7\n"


async def test_unfit_patch_changes_nothing_outside(place: AgentWorkplace, tmp_path: Path) -> None:
    evil = (
        b"diff --git a/../escaped b/../escaped\nnew file mode 100644\n--- /dev/null\n+++ b/../escaped\n@@"
        b" -0,0 +1 @@\n+x\n"
    )
    done = await apply(place.runtimes[1], Patch(content=evil), Repository(folder=TESTBED_PATH))
    assert isinstance(done, UnusablePatch)
    assert "does not apply to a clean /testbed" in done.reason
    assert not (tmp_path / "escaped").exists()


FORGED = {
    "a second file without its own first line": (
        "--- a/tests/t.py\n+++ b/tests/t.py\n@@ -1 +1 @@\n-strict\n+lax\n"
    ),
    "another name in its lines": (
        "diff --git a/b.py b/b.py\n--- a/tests/t.py\n+++ b/tests/t.py\n@@ -1 +1 @@\n-strict\n+lax\n"
    ),
    "a mode": "diff --git a/tests/t.py b/tests/t.py\nold mode 100644\nnew mode 100755\n",
    "one more file": (
        "diff --git a/tests/u.py b/tests/u.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/u.py\n@@ -0,0"
        " +1 @@\n+x\n"
    ),
    "a link": (
        "diff --git a/tests/v b/tests/v\nnew file mode 120000\n--- /dev/null\n+++ b/tests/v\n@@ -0,0 +1"
        " @@\n+/\n\\ No newline at end of file\n"
    ),
}


@pytest.mark.parametrize("forged", FORGED)
async def test_forged_patch_spares_excluded_files(tmp_path: Path, forged: str) -> None:
    """Its git, or what it found instead of git in its PATH, may have written anything."""
    place = make_workplace(tmp_path, {"a.py": b"1\n", "tests/t.py": b"strict\n"})
    honest = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"
    of = Repository(folder=TESTBED_PATH, exclude=("tests/*",))
    done = await apply(place.runtimes[1], Patch(content=(honest + FORGED[forged]).encode()), of)
    assert isinstance(done, UnusablePatch)
    assert "it changes what is not the agent's to change" in done.reason


async def test_excluded_paths_may_be_anything(tmp_path: Path) -> None:
    place = make_workplace(
        tmp_path,
        {
            "a.py": b"1\n",
            "tests/t \xff'\n.py".encode("latin1").decode("latin1"): b"strict\n",
            "tests/data": b"\0",
        },
    )
    (place.clean / "tests/link").symlink_to("/nowhere")
    git(place.clean / "tests", "init", "--quiet", "inner")
    (place.left / "a.py").write_text("2\n")
    (place.left / "tests/data").write_text("mine")
    found = await place.patch(exclude=("tests/*",))
    assert isinstance(found, Patch)
    done = await apply(
        place.runtimes[1], found, Repository(folder=TESTBED_PATH, exclude=("tests/*", "*.nothing"))
    )
    assert isinstance(done, Patch), done
    assert (place.clean / "a.py").read_text() == "2\n"


# ── reading patches ───────────────────────────────────────────────────────────


def test_sections_split_at_header_lines() -> None:
    """Sections are taken by their first lines alone."""
    one = (
        b"diff --git a/x y.py b/x y.py\n--- a/x y.py\n+++ b/x y.py\n@@ -1 +1 @@\n-a\n+diff --git a/forged"
        b" b/forged\r\x0c\n"
    )
    other = b'diff --git "a/\\303\\251\\t\\"" "b/\\303\\251\\t\\""\nnew file mode 100644\n'
    assert patches.paths(one + other) == ("x y.py", 'é\t"')
    assert list(patches.sections(b"Submodule x:\n" + one)) == [(None, b"Submodule x:\n"), ("x y.py", one)]
    assert patches.without(one + other, ("x*",)) == other
    assert patches.without(one.replace(b"x y.py", b".git/config"), ()) == b""


NAMES = st.binary(min_size=1, max_size=12).map(lambda raw: raw.replace(b"\0", b"n").replace(b"/", b"s"))


@given(
    names=st.lists(
        NAMES.filter(lambda raw: raw.strip(b".") != b"" and raw.lower() != b".git"),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
@settings(max_examples=25, deadline=None)
def test_git_and_we_read_the_same_names(tmp_path_factory: pytest.TempPathFactory, names: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("names")
    git(folder, "init", "--quiet")
    for name in names:
        with open(os.fsencode(folder) + b"/" + name, "wb") as file:
            file.write(b"x\n")
    git(folder, "add", "--all", "--force")
    patch = git(folder, "diff", "--cached", "--no-renames").encode() + b"\n"
    assert sorted(os.fsencode(path) for path in patches.paths(patch)) == sorted(names)


def test_scripts_ignore_system_git_config() -> None:
    for script in (patches.TREE, patches.EXTRACT_SCRIPT, patches.APPLY_SCRIPT):
        assert "GIT_CONFIG_NOSYSTEM=1" in script


# ── of a session that is evaluated again ──────────────────────────────────────


async def test_kept_patch_replaces_lost_repository(
    place: AgentWorkplace,
) -> None:
    """A patch that was kept takes the place of a repository that was not."""
    (place.left / "a.py").write_text("a = 3\n")
    (place.left / "excluded.py").write_text("not the agent's\n")
    found = await place.patch()
    assert isinstance(found, Patch)
    clean = place.runtimes[1]
    of = Repository(folder=TESTBED_PATH, exclude=("excluded.py",))
    shape = finished(clean, {}, left=Gone(why="it is gone", workdir="/work"))
    again = evolve(shape, kept=KeptWork(patch=found.content))
    carried = await patches.carried(again, of)
    assert isinstance(carried, Patch)
    assert carried.paths == ("a.py",)
    assert (place.clean / "a.py").read_text() == "a = 3\n"
    assert not (place.clean / "excluded.py").exists()
    for kept in (KeptWork(), KeptWork(folder="/work")):
        with pytest.raises(
            EvaluatorError, match=r"/testbed of the session was not kept, nor its whole patch: set"
        ):
            await patches.carried(evolve(shape, kept=kept), of)


async def test_kept_repository_is_read_again(place: AgentWorkplace) -> None:
    (place.left / "a.py").write_text("a = 3\n")
    left, clean = place.runtimes
    again = evolve(finished(clean, {}, left=left), kept=KeptWork(folder="/", patch=b"no patch at all"))
    carried = await patches.carried(again, Repository(folder=TESTBED_PATH))
    assert isinstance(carried, Patch)
    assert carried.paths == ("a.py",)
