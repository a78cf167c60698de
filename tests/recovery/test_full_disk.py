"""The journal's disk is full: new tasks are refused with 507, running ones finish in memory, and all of it is
written when there is room again.

The disk is a tmpfs of the test's own, as large as what the node wants free and a little more; the ballast
that fills it is memory, and gone at once.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from recovery_kit import (
    SETTINGS,
    Traces,
    account,
    fill,
    place_at,
    read_ledger,
    short_temporary,
    texts_of,
    until,
)

from polarnode.client import ClientError
from polarnode.journal.values import TASK_DISK_FREE_BYTES

pytestmark = pytest.mark.podman

ROOM = 48 << 20  # beyond what a node wants free: journal, logs, and some for the file system itself


@contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TASK_DISK_FREE_BYTES + ROOM}", "tmpfs", str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_full_disk_loses_no_running_task(podman_works: None, tmp_path: Path) -> None:
    """A full disk refuses new tasks, and loses no running one."""
    with short_temporary() as temporary, small_disk(tmp_path / "disk") as disk:
        # sessions begin whatever room there is
        place = place_at(disk, temporary, settings=f"disk_reserve_mb = 0\n{SETTINGS}")
        traces = Traces(place)
        with place.serving() as node:
            running = node.client.submit(place.task(turns=None, pause=0.05, until="enough", num_samples=2))
            node.under_way(*running.session_ids, turns=3)
            ballast = fill(disk)
            # entries that are being written wait for a moment too; the warning comes with a write that failed
            until(lambda: node.status()["journal"]["warning"], "a write has failed")
            until(lambda: node.status()["journal"]["backlog_entries"], "turns wait in memory")
            with pytest.raises(ClientError) as refused:
                node.client.submit(place.task(turns=1))
            assert (refused.value.status, refused.value.type) == (507, "disk_full")
            assert not node.client.task(running.task_id)["finished"], "what is not on disk is not told"
            for each in traces.note_containers():
                Path(f"/proc/{each['Pid']}/root/work/enough").touch()
            until(lambda: not node.status()["sessions"], "the running ones finish in memory")
            assert node.status()["journal"]["backlog_entries"] > 0
            ballast.unlink()
            until(lambda: node.client.task(running.task_id)["finished"], "all is written when there is room")
            assert node.status()["journal"]["warning"] is None
            for session_id in running.session_ids:
                final = node.client.trajectory(session_id, turns="full")
                ledger = read_ledger(node.log(session_id), whole=True)
                assert final.outcome.status == "completed"
                assert ledger is None or texts_of(final)[: len(ledger.texts)] == ledger.texts, (
                    "its log had no room for all"
                )
            assert node.client.submit(place.task(turns=1)).created
            traces.note_processes(node)
        assert node.process.returncode == 0, node.said()[-3000:]
        traces.check_nothing_left()
        account(place.state_dir)
