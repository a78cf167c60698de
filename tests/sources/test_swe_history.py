"""What an agent finds of the solution in a repository of SWE-bench's images, after the task's own step."""

import subprocess
from pathlib import Path

from polarnode.sources.swe import CUT, WORKDIR


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=n", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *named, "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout


def test_later_commits_are_pruned(tmp_path: Path) -> None:
    """Neither a name nor an unreachable object is left of what came after the base commit."""
    git(tmp_path, "init", "-q", "-b", "main")
    for text in ("one", "two", "fix"):
        (tmp_path / "f").write_text(text)
        git(tmp_path, "add", "f")
        git(tmp_path, "commit", "-qm", text)
    fix = git(tmp_path, "rev-parse", "HEAD").strip()
    git(tmp_path, "tag", "v1", "HEAD~1")
    git(tmp_path, "tag", "content", "HEAD:f")
    git(tmp_path, "reset", "-q", "--hard", "HEAD~1")
    subprocess.run(["sh", "-ec", CUT.replace(WORKDIR, str(tmp_path))], check=True)
    found = subprocess.run(["git", "-C", str(tmp_path), "cat-file", "-e", fix], check=False)
    assert found.returncode != 0
    assert git(tmp_path, "tag").split() == ["v1"]
    assert git(tmp_path, "fsck", "--unreachable", "--no-reflogs") == ""
