"""Attempts to gain rights, and to leave the container: each fails, and what fails is said by the kernel."""

import json
import socket
from pathlib import Path

import pytest
from hostile_kit import Arena, reported
from live_kit import MARK, TOKEN

pytestmark = pytest.mark.podman
ROOT = Path(__file__).parents[2]

GAIN = """
    import ctypes, glob, itertools, os, socket, stat, subprocess
    from inside import outcome, turn, tell
    libc = ctypes.CDLL(None, use_errno=True)
    def checked(result):
        if result < 0:
            raise OSError(ctypes.get_errno(), "no")
    def run(*argv):
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if ended.returncode:
            raise OSError(ended.returncode, ended.stderr)
        return ended.stdout
    def write(path):
        "Opened only: were it allowed, this machine must not be the worse for it."
        os.close(os.open(path, os.O_WRONLY))
    def every(pattern):
        done = []
        for path in itertools.islice(glob.iglob(pattern, recursive=True), 3000):
            if os.path.isfile(path) and not os.path.islink(path) and outcome(lambda: write(path)) == "DONE":
                done.append(path)
        if not done:
            raise OSError("none")
        tell(written=done[:20])
    def setuid():
        for path in sum([glob.glob(each) for each in ("/bin/*", "/usr/bin/*", "/usr/sbin/*", "/usr/lib/*/*")], []):
            try:
                mode = os.stat(path).st_mode
            except OSError:
                continue
            if mode & stat.S_ISUID and os.path.basename(path) in ("su", "mount", "umount", "newgrp", "chsh", "passwd"):
                said = subprocess.run([path, "-c", "id -u"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL).stdout
                if said.strip() == "0":
                    return
        raise OSError("none gave root")
    def own_setuid():
        with open("/work/sh", "wb") as file:
            file.write(open("/bin/sh", "rb").read())
        os.chmod("/work/sh", 0o4755)
        if run("/work/sh", "-p", "-c", "id -u").strip() != "0":
            raise OSError("not root")
    def in_user_namespace():
        "Rights over a namespace of one's own are no rights over the machine's."
        script = (
            ": >> /proc/sys/kernel/sysrq || mount -o remount,rw / || mount -o remount,rw /proc/sys || umount /proc/sys/kernel"
            " || mount -t cgroup none /work || mount -t cgroup2 none /work || mknod /work/disk b 8 0 || mount /dev/vda /work || nsenter -t 1 -a true"
            " || nsenter -t 1 -n true || date -s @$(date +%s) || hostname changed-$(cat /proc/sys/kernel/hostname)x-nobody"
        )
        run("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"({script}) 2>/dev/null")
    attempts = {
        "setuid": setuid,
        "own_setuid": own_setuid,
        "setuid_call": lambda: os.setuid(0),
        "setgroups": lambda: os.setgroups([0]),
        "capability": lambda: checked(libc.prctl(47, 2, 21, 0, 0)),
        "new_privileges": lambda: checked(libc.prctl(38, 0, 0, 0, 0)),
        "chroot": lambda: os.chroot("/work"),
        "mount": lambda: checked(libc.mount(b"none", b"/work", b"tmpfs", 0, None)),
        "bind": lambda: checked(libc.mount(b"/", b"/work", None, 4096, None)),
        "remount": lambda: checked(libc.mount(b"none", b"/", None, 32, None)),
        "unmount": lambda: checked(libc.umount2(b"/proc", 2)),
        "pivot": lambda: checked(libc.syscall(155, b"/work", b"/work")),
        "user_namespace": in_user_namespace,
        "network_namespace": lambda: run("unshare", "--net", "true"),
        "mount_namespace": lambda: run("unshare", "--mount", "true"),
        "enter_first": lambda: run("nsenter", "-t", "1", "-a", "true"),
        "enter_network": lambda: checked(libc.setns(os.open("/proc/1/ns/net", os.O_RDONLY), 0)),
        "device": lambda: os.mknod("/work/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0)),
        "memory_device": lambda: os.mknod("/work/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1)),
        "sysrq": lambda: write("/proc/sysrq-trigger"),
        "sysctl": lambda: every("/proc/sys/**"),
        "kcore": lambda: open("/proc/kcore", "rb").read(1),
        "kmsg": lambda: open("/dev/kmsg", "rb").read(1),
        "dmesg": lambda: run("dmesg"),
        "cgroups": lambda: every("/sys/fs/cgroup/**"),
        "sys": lambda: every("/sys/[a-eg-z]*/**"),
        "cgroup_made": lambda: os.mkdir("/sys/fs/cgroup/mine"),
        "core_pattern": lambda: write("/proc/sys/kernel/core_pattern"),
        "modprobe": lambda: write("/proc/sys/kernel/modprobe"),
        "hotplug": lambda: write("/sys/kernel/uevent_helper"),
        "raw_ip": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "raw_packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
        "hosts_socket": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
        "keyring": lambda: checked(libc.syscall(248, b"user", b"x", b"y", 1, -3)),
        "bpf": lambda: checked(libc.syscall(321, 0, 0, 0)),
        "perf": lambda: checked(libc.syscall(298, 0, 0, -1, -1, 0)),
        "userfault": lambda: checked(libc.syscall(323, 0)),
        "io_uring": lambda: checked(libc.syscall(425, 1, 0)),
        "module": lambda: checked(libc.syscall(313, 0, b"", 0)),
        "reboot": lambda: checked(libc.syscall(169, 0xFEE1DEAD, 0, 0, 0)),
        "swap": lambda: checked(libc.syscall(168, b"/work/x")),
        "clock": lambda: __import__("time").clock_settime(0, 0),
        "hostname": lambda: socket.sethostname("owned"),
        "handle": lambda: checked(libc.syscall(304, -100, ctypes.create_string_buffer(64), 0)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
        "realtime": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)),
        "limits": lambda: __import__("resource").setrlimit(7, (1 << 20, 1 << 20)),
        "passwords": lambda: open("/etc/shadow").read(),
        "root_home": lambda: os.listdir("/root"),
        "etc": lambda: write("/etc/passwd"),
        "usr": lambda: write("/usr/bin/python3"),
        "preload": lambda: open("/etc/ld.so.preload", "x"),
        "init": lambda: write("/dev/polarnode-init"),
    }
    tell(first=turn())
    found = {}
    for name, work in attempts.items():
        found[name] = outcome(work)
        tell(attempts=found)
    tell(second=turn())
"""


def test_no_right_is_gained(arena: Arena) -> None:
    found = reported(arena.attack(GAIN))
    done = sorted(name for name, said in found["attempts"].items() if said == "DONE")
    assert done == [], found.get("written")
    assert len(found["attempts"]) > 50
    assert found["second"] == 200


def test_nothing_of_machine_is_read(arena: Arena) -> None:
    """Neither the node's environment nor its state, by any name they have on the machine; nor who else runs
    here.
    """
    look = """
        import glob, json, os, socket
        from inside import outcome, turn, tell
        given = json.loads(os.environ["GIVEN"])
        processes = sorted(filter(str.isdigit, os.listdir("/proc")), key=int)
        texts = []
        for pattern in ("/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline", "/proc/mounts", "/proc/self/mountinfo", "/proc/cmdline", "/etc/hosts", "/etc/resolv.conf"):
            for path in glob.glob(pattern):
                try:
                    texts.append((path, open(path, errors="replace").read()))
                except OSError:
                    pass
        tell(
            turn=turn(),
            files=[path for path in given["files"] if os.path.lexists(path)],
            leaked=[[path, word] for path, text in texts for word in given["words"] if word in text],
            processes=len(processes),
            hostname=socket.gethostname(),
        )
    """
    state = str(arena.node.state_dir)
    words = ["POLARNODE_TOKEN", "POLARNODE_NODE_ID", TOKEN, MARK, str(arena.node.temporary)]
    given = {
        "files": [state, str(arena.node.temporary), str(ROOT), "/var/lib/polarnode", "/run/podman"],
        "words": words,
    }
    found = reported(arena.attack(look, env={"GIVEN": json.dumps(given)}))
    assert found["files"] == []
    assert [each for each in found["leaked"] if not _own(each)] == []
    assert found["processes"] == 2
    assert found["hostname"] != socket.gethostname()


def _own(leak: list[str]) -> bool:
    """The test's own list is in the environment of the script it is given to."""
    return leak[0].endswith("/environ") and leak[0] != "/proc/1/environ"
