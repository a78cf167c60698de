"""Pack what a GPU machine without a network needs: wheels of tools/constraints-gpu.txt and of this project.

    python tools/gpu_bundle.py OUT [--wheels FOLDER] [--part-mb 55]

Writes OUT/bundle.000, .001 …, each at most so many MB (55: what the machines we know take is 60), with
SHA256SUMS and install.sh. On the machine, in a folder with all of them: `sh install.sh` checks the parts,
unpacks them and makes .venv, with no network. It needs Python of the version that made the bundle, and
about twice 4.3 GB. `--wheels` packs a folder of wheels that are there already.
"""

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO, Final, cast

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "tools" / "constraints-gpu.txt"
INSTALL: Final = """#!/bin/sh
# Check the parts of the bundle, unpack them, and install polarnode from them: no network is needed.
set -eu
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS
cat bundle.[0-9][0-9][0-9] | tar -xf -
[ "${1:-}" = unpack ] && exit 0
python3 -m venv .venv
.venv/bin/python -m pip install --quiet --no-index --find-links wheels 'polarnode[gpu]'
echo "installed: $PWD/.venv/bin/polarnode doctor --gpus 0"
"""


class Parts(io.RawIOBase):
    """What is written, in files of at most `size` bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.left, self.number = folder, size, 0, 0
        self.file: BinaryIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(cast(bytes, data))
        written = 0
        while written < len(view):
            if not self.left:
                self._next()
            piece = view[written : written + self.left]
            cast(BinaryIO, self.file).write(piece)
            written += len(piece)
            self.left -= len(piece)
        return written

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        super().close()

    def _next(self) -> None:
        if self.number > 999:
            raise OSError("the bundle has more than 1,000 parts: give a larger --part-mb")
        if self.file is not None:
            self.file.close()
        self.file = (self.folder / f"bundle.{self.number:03}").open("wb")
        self.number, self.left = self.number + 1, self.size


def download(wheels: Path) -> None:
    """The wheels of the lock for this Python on Linux amd64, and our own."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True)
    subprocess.run(
        [*pip, "download", "--quiet", "--constraint", str(LOCK), "--dest", str(wheels), f"{ROOT}[gpu]"],
        check=True,
    )
    for archive in wheels.glob("*.tar.gz"):  # packages that have no wheel
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "-w", str(wheels), str(archive)], check=True)
        archive.unlink()


def pack(wheels: Path, out: Path, part_bytes: int) -> list[Path]:
    """The parts of all files in `wheels`, with their sums and install.sh. Raises OSError for a folder that
    has parts already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("bundle.*")):
        raise OSError(f"{out} has parts of another bundle: name an empty folder")
    with Parts(out, part_bytes) as parts, tarfile.open(fileobj=parts, mode="w|") as archive:
        for file in sorted(wheels.iterdir()):
            archive.add(file, arcname=f"wheels/{file.name}")
    found = sorted(out.glob("bundle.*"))
    (out / "SHA256SUMS").write_text("".join(f"{_digest(part)}  {part.name}\n" for part in found))
    (out / "install.sh").write_text(INSTALL)
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--part-mb", type=int, default=55)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels = given.wheels or Path(folder)
        if given.wheels is None:
            download(wheels)
        parts = pack(wheels, given.out, given.part_mb << 20)
    size = sum(part.stat().st_size for part in parts) >> 20
    print(f"{given.out}: {len(parts)} parts of {given.part_mb} MB at most, {size} MB; then: sh install.sh")


if __name__ == "__main__":
    main()
