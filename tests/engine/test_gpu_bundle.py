"""The bundle for a GPU machine without a network: parts that are small enough, and whole again where they are
joined.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def bundle() -> Iterator[Any]:
    sys.path.insert(0, str(TOOLS))
    try:
        import gpu_bundle

        yield gpu_bundle
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, size in enumerate((0, 1, 999, 70_000)):
        (folder / f"w{number}.whl").write_bytes(bytes(range(256)) * (size // 256 + 1))
    return folder


def unpack(out: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["sh", str(out / "install.sh"), "unpack"], capture_output=True, text=True)


def test_small_parts_join_to_archive(bundle: Any, wheels: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = bundle.pack(wheels, out, 10_000)
    assert len(parts) > 7
    assert all(part.stat().st_size <= 10_000 for part in parts)
    done = unpack(out)
    assert done.returncode == 0, done.stderr
    for file in wheels.iterdir():
        assert (out / "wheels" / file.name).read_bytes() == file.read_bytes()


def test_truncated_part_is_detected(bundle: Any, wheels: Path, tmp_path: Path) -> None:
    parts = bundle.pack(wheels, tmp_path / "out", 10_000)
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    done = unpack(tmp_path / "out")
    assert done.returncode != 0
    assert parts[2].name in done.stdout + done.stderr
    assert not (tmp_path / "out" / "wheels").exists()


def test_folder_with_parts_is_refused(bundle: Any, wheels: Path, tmp_path: Path) -> None:
    bundle.pack(wheels, tmp_path / "out", 10_000)
    with pytest.raises(OSError, match="name an empty folder"):
        bundle.pack(wheels, tmp_path / "out", 10_000)
