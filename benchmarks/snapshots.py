"""Measure snapshots: how long a call is held for one, and how long a fresh container takes to get its files.

    python benchmarks/snapshots.py                    half a minute, real Podman: 10 MB and 100 MB
    python benchmarks/snapshots.py --repeats 10

`held` is what a call waits: processes before and after, and the archive. `restore` is what a fork's fresh
container takes beyond its start. Each is the median and the worst of the repeats, in seconds.
"""

import argparse
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio
from attrs import frozen

from polarnode.containers.images import ensure_images
from polarnode.containers.probe import default_state_dir
from polarnode.containers.recipes import RuntimesSettings
from polarnode.containers.runtime import PodmanRuntime
from polarnode.containers.runtimes import NodeRuntimes, open_runtimes
from polarnode.core.task import RuntimeSpec

LIFETIME_S: Final = 900.0
SPEC: Final = RuntimeSpec(image="base", memory_mb=512, pids=64)
MAKE: Final = (
    'i=0; while [ $i -lt "$1" ]; do mkdir -p d$((i/100)); head -c "$2" /dev/urandom > d$((i/100))/f$i;'
    " i=$((i+1)); done"
)


@frozen
class Size:
    """A workspace: so many files of so many bytes together."""

    files: int
    bytes: int


SIZES: Final = (Size(500, 10_000_000), Size(5_000, 100_000_000))


@frozen(kw_only=True)
class Times:
    """Seconds of each repeat, and what the archive had."""

    held: tuple[float, ...]
    restore: tuple[float, ...]
    files: int
    bytes: int

    def row(self) -> str:
        cells = (f"{statistics.median(each):.2f} ({max(each):.2f})" for each in (self.held, self.restore))
        return f"| {self.bytes / 1e6:.0f} MB, {self.files} files | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    trio.run(measure, given.repeats)
    return 0


async def measure(repeats: int) -> None:
    """The table."""
    settings = RuntimesSettings(state_dir=default_state_dir(), node_id="benchmark", warm=0)
    with TemporaryDirectory() as folder:
        await ensure_images(settings, ["base"], log=Path(folder) / "build.log", report=print)
        print("| writable files | held s | restore s |\n|---|---|---|")
        async with open_runtimes(settings) as runtimes:
            for size in SIZES:
                print((await times(runtimes, size, repeats, Path(folder))).row(), flush=True)


async def times(runtimes: NodeRuntimes, size: Size, repeats: int, folder: Path) -> Times:
    """Take and restore a snapshot again and again; each restore is of a container of its own."""
    held, restored = list[float](), list[float]()
    async with runtimes.open(SPEC, session_id="source", lifetime_s=LIFETIME_S) as source:
        made = await source.run(["sh", "-c", MAKE, "sh", str(size.files), str(size.bytes // size.files)])
        if made.exit_code != 0:
            raise SystemExit(f"the files could not be made: {made.stderr.decode(errors='replace')}")
        await source.seal(SPEC)
        for number in range(repeats):
            tar = folder / f"{number}.tar"
            began = trio.current_time()
            await source.processes()
            kept = await source.snapshot(SPEC, tar, 1 << 30)
            await source.processes()
            held.append(trio.current_time() - began)
            restored.append(await _restore(runtimes, tar, kept.places))
            await trio.Path(tar).unlink()
    return Times(held=tuple(held), restore=tuple(restored), files=kept.files, bytes=kept.bytes)


async def _restore(runtimes: NodeRuntimes, tar: Path, places: tuple[str, ...]) -> float:
    async with runtimes.open(SPEC, session_id="target", lifetime_s=LIFETIME_S) as target:
        began = trio.current_time()
        await target.restore_snapshot(tar, places)
        spent = trio.current_time() - began
        await _check(target)
    return spent


async def _check(target: PodmanRuntime) -> None:
    if await target.read("/work/d0/f0") is None:
        raise SystemExit("a restored container lacks its files, the figures mean nothing")


if __name__ == "__main__":
    sys.exit(main())
