"""Attacks on what the kernel counts for the whole machine and no control group counts: one session takes all it
can get, and meanwhile root on the machine and a sibling still get what they need.
"""

import json
import subprocess
import sys
import textwrap

import pytest
from hostile_kit import Arena, reported
from live_kit import until
from podman_parts import kept_limits

pytestmark = pytest.mark.podman

# Each takes one of its kind and raises OSError when there is none; what they take is kept.
TAKERS = """
    import ctypes, errno, os, signal, socket
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    signal.pthread_sigmask(signal.SIG_BLOCK, [40])
    kept = []
    def checked(result):
        if result < 0:
            raise OSError(ctypes.get_errno(), "no")
        kept.append(result)
    def queue():
        "A POSIX message queue of the usual size: flags, messages, bytes of each, and what the kernel fills in."
        size, name = (ctypes.c_long * 8)(0, 10, 8192), f"taken{os.getpid()}-{len(kept)}".encode()
        checked(libc.syscall(240, name, os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(size)))
        libc.syscall(241, name)  # it stays as long as it is open
    def context():
        checked(libc.syscall(206, 1, ctypes.byref(ctypes.c_ulong(0))))
    takers = {
        "watchers": lambda: checked(libc.syscall(294, 0)),
        "terminals": lambda: kept.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)),
        "timers": lambda: checked(libc.syscall(222, 0, None, ctypes.byref(ctypes.c_int()))),
        "signals": lambda: checked(libc.sigqueue(os.getpid(), 40, None)),
        "queues": queue,
        "contexts": context,
        "keyrings": lambda: checked(libc.syscall(250, 1, f"taken{len(kept)}".encode())),
        "keys": lambda: checked(libc.syscall(248, b"user", f"taken{len(kept)}".encode(), b"x", 1, -3)),
        "files": lambda: kept.append(os.open("/dev/null", os.O_RDONLY)),
        "namespaces": lambda: checked(libc.unshare(0x10000000)),
        "vsock": lambda: kept.append(socket.socket(40, socket.SOCK_STREAM)),
        "ciphers": lambda: kept.append(socket.socket(38, socket.SOCK_SEQPACKET)),
        "packet_filters": lambda: kept.append(socket.socket(16, socket.SOCK_RAW, 12)),
        "rings": lambda: checked(libc.syscall(425, 1, 0)),
        "groups": lambda: checked(libc.syscall(300, 0, 0)),
    }
    def taken(name, most):
        for number in range(most):
            try:
                takers[name]()
            except OSError as error:
                return [number, errno.errorcode[error.errno]]
        return [most, None]
"""
GREEDY = """
    import time
    from inside import turn, tell
    tell(first=turn(), found={name: taken(name, 100_000) for name in takers if name != "files"})
    files = taken("files", 100_000)
    for _ in range(100):
        os.close(kept.pop())
    tell(files=files)
    print("EVERYTHING IS TAKEN", flush=True)
    time.sleep(3600)
"""
MODEST = """
    from inside import turn, tell
    tell(turn=turn(), found={name: taken(name, 4) for name in ("watchers", "terminals", "timers", "signals")})
"""
# what a session gets at most, and the error after that; the numbers are of containers/inside.py and container.py
BOUNDS = {
    "watchers": [16, "EMFILE"],
    "terminals": [32, "ENOSPC"],
    "timers": [1024, "EAGAIN"],
    "signals": [0, "EAGAIN"],  # counted with the timers
    "queues": [1, "EMFILE"],
    "contexts": [0, "ENOSYS"],
    "keyrings": [0, "ENOSYS"],
    "keys": [0, "ENOSYS"],
    "namespaces": [0, "ENOSPC"],
    "vsock": [0, "EAFNOSUPPORT"],
    "ciphers": [0, "EAFNOSUPPORT"],
    "packet_filters": [0, "EPROTONOSUPPORT"],
    "rings": [0, "ENOSYS"],
    "groups": [0, "ENOSYS"],
}
ENOUGH = {name: [4, None] for name in ("watchers", "terminals", "timers", "signals", "queues")}


@kept_limits
def test_session_cannot_exhaust_machine_resources(arena: Arena) -> None:
    """One session cannot take what the machine has only once."""
    greedy = arena.start(TAKERS + GREEDY, budgets={"run_s": 600})
    try:
        until(
            lambda: "EVERYTHING IS TAKEN" in arena.node.log(greedy) or arena.node.under_way(greedy, turns=0),
            "the greedy session has what it can get",
        )
        facts: dict[str, object] = {}
        for line in arena.node.log(greedy).splitlines():
            if line.startswith("{"):
                facts.update(json.loads(line))
        assert facts["found"] == BOUNDS
        assert facts["files"][1] == "EMFILE"  # type: ignore[index]
        assert _root_gets() == ENOUGH
        sibling = reported(arena.attack(TAKERS + MODEST))
        assert sibling["found"] == {name: ENOUGH[name] for name in sibling["found"]}
        assert sibling["turn"] == 200
    finally:
        arena.node.client.cancel(arena.node.task_of(greedy))
        trajectory = arena.node.finished(greedy)
    assert (trajectory.outcome.status, len(trajectory.turns)) == ("cancelled", 1), trajectory.outcome


def _root_gets() -> object:
    look = f"import json\nprint(json.dumps({{name: taken(name, 4) for name in {tuple(ENOUGH)}}}))"
    script = textwrap.dedent(TAKERS) + look
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(ran.stdout)


@kept_limits
def test_socket_memory_is_bounded(arena: Arena) -> None:
    """Four times its memory is sent to sockets of its own that nobody reads; the machine's share of them is
    for all.
    """
    sender = """
        import socket
        from inside import turn, tell
        listener, kept, sent = socket.create_server(("127.0.0.1", 9999)), [], 0
        for _ in range(400):
            ends = socket.create_connection(("127.0.0.1", 9999)), listener.accept()[0]
            kept.extend(ends)
            for end in ends:
                end.setblocking(False)
                try:
                    while True:
                        sent += end.send(bytes(65536))
                except OSError:
                    pass
        tell(turn=turn(), sent=sent >> 20, in_use=open("/proc/net/sockstat").read())
    """
    trajectory = arena.attack(sender, evaluator={"name": "session_completed"})
    if trajectory.outcome.exit_code == 137:  # cgroups v2 count sockets with its memory
        return
    log = arena.log(trajectory)
    assert '"sent": ' in log, trajectory.outcome
    assert int(log.partition('"sent": ')[2].partition(",")[0]) < 192


def test_pipe_account_files_block_nothing(arena: Arena) -> None:
    """A task that lets its harness write anywhere, as root: Podman would wait for ever for who writes into
    them.
    """
    piper = """
        import os
        from inside import turn, tell
        turn()
        for path in ("/etc/passwd", "/etc/group"):
            os.remove(path)
            os.mkfifo(path)
    """
    outcome = arena.attack(piper, runtime={"user": "root", "read_only": False}).outcome
    assert (outcome.status, outcome.boundary) == ("error", "evaluator"), outcome
    assert "no plain file" in str(outcome.reason)
