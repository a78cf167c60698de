"""Attacks on what the machine has: processes, memory, the disk, the log."""

import pytest
from hostile_kit import Arena, reported
from podman_parts import kept_limits

pytestmark = pytest.mark.podman


@kept_limits
def test_fork_bomb_ends_at_limit(arena: Arena) -> None:
    """It takes its container's process ids and no others; the harness goes on, and all of it is gone with the
    run.
    """
    bomb = """
        import os, time
        from inside import turn, tell
        tell(first=turn())
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.01)
        time.sleep(2)
        def forked():
            try:
                pid = os.fork()
            except OSError:
                return False
            if pid == 0:
                os._exit(0)
            return True
        tell(forked=forked(), second=turn())
    """
    trajectory = arena.attack(bomb)
    found = reported(trajectory)
    assert (found["first"], found["second"], found["forked"]) == (200, 200, False)
    assert len(trajectory.turns) == 2


@kept_limits
def test_memory_hog_is_ended_alone(arena: Arena) -> None:
    """The kernel ends the greedy process in its own container; what the session had is kept, and its outcome
    says how it ended.
    """
    hog = """
        from inside import turn, tell
        tell(first=turn())
        kept = []
        while True:
            kept.append(bytes(range(256)) * (1 << 16))
    """
    trajectory = arena.attack(hog)
    assert (trajectory.outcome.status, trajectory.outcome.exit_code) == ("failed", 137), trajectory.outcome
    assert len(trajectory.turns) == 1


@kept_limits
def test_file_memory_counts_too(arena: Arena) -> None:
    """Shared memory has a size of its own, and a tmpfs is its container's memory."""
    filler = """
        import errno, os
        from inside import turn, tell
        def fill(path):
            block = bytes(1 << 20)
            with open(path, "wb") as file:
                for number in range(600):
                    try:
                        file.write(block)
                        file.flush()
                    except OSError as error:
                        return [number, errno.errorcode[error.errno]]
            return [600, "no end"]
        found = {"shm": fill("/dev/shm/full")}
        os.remove("/dev/shm/full")
        for place in ("/dev", "/dev/mqueue", "/run", "/proc", "/sys"):
            try:
                open(place + "/mine", "wb").close()
                found[place] = "WRITTEN"
            except OSError as error:
                found[place] = errno.errorcode[error.errno]
        tell(found=found, turn=turn())
    """
    found = reported(arena.attack(filler))["found"]
    assert found["shm"][0] <= 64
    assert found["shm"][1] in ("ENOSPC", "ENOMEM")
    assert (
        "WRITTEN"
        not in {
            name: said for name, said in found.items() if name.startswith("/") and name != "/dev/mqueue"
        }.values()
    ), found


@kept_limits
def test_empty_files_in_memory_count(arena: Arena) -> None:
    """Each takes a kilobyte of the kernel's, which is the container's too: it ends at its own limit, in one
    of two honest ways.
    """
    filler = """
        import os
        from inside import turn, tell
        tell(first=turn())
        try:
            for number in range(10_000_000):
                open(f"/dev/shm/{number}", "wb").close()
        except OSError:
            pass
    """
    trajectory = arena.attack(filler, evaluator={"name": "session_completed"}, runtime={"memory_mb": 64})
    assert (trajectory.outcome.status, trajectory.outcome.exit_code) in (("failed", 137), ("completed", 0)), (
        trajectory.outcome
    )


def test_output_flood_is_bounded(arena: Arena) -> None:
    """Half a gigabyte on both streams at once: the log keeps its beginning and its end, and the node does not
    keep what it drops.
    """
    flood = """
        import os, threading
        from inside import turn, tell
        tell(first=turn())
        print("THE BEGINNING", flush=True)
        block = (b"flood " * 1000 + b"\\n") * 100
        def pour(stream):
            for _ in range(250):
                os.write(stream, block)
        threads = [threading.Thread(target=pour, args=(stream,)) for stream in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tell(second=turn())
        print("THE END", flush=True)
    """
    with arena.growing_at_most(200):
        trajectory = arena.attack(flood)
    assert reported(trajectory)["second"] == 200
    log = arena.log(trajectory)
    assert "THE BEGINNING" in log
    assert "THE END" in log
    assert len(log) < 5 << 20
