"""A node of a user without root: real Podman in their own user namespace, a real container, and the sentences
that name what their machine lacks.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from live_kit import free_port, until
from rootless_kit import User, open_user

from polarnode.client import ClientError, PolarnodeClient, Unreachable
from polarnode.containers.probe import default_state_dir, store_at

pytestmark = pytest.mark.podman

# looks around, tries what it may not, leaves a program behind, and outstays its time
HARNESS = """
import json, os, subprocess, urllib.request

def tried(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
    return "written"

body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for turn in range(2):
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
seen = {
    "uid": os.getuid(),
    "etc": tried("/etc/x"),
    "capabilities": open("/proc/self/status").read().partition("CapEff:")[2].split()[0],
    "networks": sorted(os.listdir("/sys/class/net")),
    "processes": sorted(name for name in os.listdir("/proc") if name.isdigit())[:1],
}
json.dump(seen, open("seen.json", "w"))
subprocess.Popen(["sleep", "565656"])
if os.environ.get("STAYS"):
    subprocess.run(["sleep", "565656"])
"""
LOAD = """
import subprocess, sys, trio
from polarnode.containers.user_namespace import enter_user_namespace
enter_user_namespace()
from polarnode.containers.probe import default_state_dir
from polarnode.containers.service import configure_store
ready = trio.run(configure_store, default_state_dir(), "best_effort")
subprocess.run([ready.podman, "load", "--quiet", "--input", sys.argv[1]], env=ready.store.environment(), check=True)
"""


@pytest.fixture(scope="module")
def user(podman_works: None) -> Iterator[User]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a user; without root the other suites run so themselves")
    if shutil.which("newuidmap") is None:
        pytest.skip("newuidmap is not installed: apt-get install uidmap")
    with open_user() as found:
        yield found


def test_missing_subordinate_ids_name_remedy(user: User) -> None:
    """Without subordinate ids the administrator's step is named."""
    ran = user.polarnode("--cpu", subordinate=False)
    assert ran.returncode == 1
    assert "this user is not root and has 1 ids of its own, where containers need 65536" in ran.stderr
    assert "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 YOUR_NAME" in ran.stderr
    assert "without it, --no-containers takes captures" in ran.stderr


def test_missing_limits_are_told_early(user: User) -> None:
    """The limits that this machine does not keep are told before anything starts."""
    doctor = user.polarnode("doctor", "--cpu")
    assert "✓ rights: root of a user namespace with 65537 ids, not of this machine" in doctor.stdout
    assert "one user namespace for all containers" in doctor.stdout
    assert "keep no limit of memory, pids, cpu without root" in doctor.stdout
    assert doctor.returncode == 1
    refused = user.polarnode("--cpu", "--state-dir", str(user.home / "home" / "state"))
    assert refused.returncode == 1
    assert "accept it: --limits best_effort" in refused.stderr


def test_sessions_run_and_leave_nothing(user: User, base_image: Path) -> None:
    loaded = user.run(sys.executable, "-B", "-c", LOAD, str(base_image))
    assert loaded.returncode == 0, loaded.stderr
    (user.home / "image").mkdir()
    (user.home / "image" / "Containerfile").write_text(
        "FROM localhost/polarnode/base\nRUN touch /work/given\n"
    )
    build = ("-m", "polarnode.cli", "image", "build", "image", "--tag", "mine/agent")
    refused = user.run(sys.executable, "-B", *build)
    assert ".polarnode cannot be written: set POLARNODE_STATE_DIR to another folder" in refused.stderr
    state = f"POLARNODE_STATE_DIR={user.home / 'home' / 'state'}"
    built = user.run("env", state, sys.executable, "-B", *build)
    assert built.returncode == 0, built.stdout + built.stderr
    tasks = []
    for stays in ("", "1"):
        harness = {"name": "shell", "command": ["python3", "-c", HARNESS], "env": {"STAYS": stays}}
        tasks.append(
            {
                "instruction": "Look around.",
                "harness": harness,
                "runtime": {"image": "mine/agent", "artifacts": ["seen.json"]},
                "evaluator": {"name": "command", "config": {"script": "test -e seen.json && test -e given"}},
                "budgets": {"run_s": 20.0},
            }
        )
    (user.home / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    ran = user.polarnode(
        *("run", "--engine", "simulated", "--gpus", "0", "--limits", "best_effort"),
        *("--out", str(user.home / "home" / "out"), str(user.home / "tasks.jsonl")),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (user.home / "home" / "out" / "trajectories.jsonl").read_text().splitlines()
    found = {each["outcome"]["status"]: each for each in map(json.loads, lines)}
    assert set(found) == {"completed", "timeout"}
    for each in found.values():
        assert each["reward"] == 1.0
        assert each["metrics"]["sampled_tokens"] == each["metrics"]["trainable_tokens"] > 0
        assert each["metrics"]["artifacts"]["files"] == 1
    assert not [each for each in user.processes().values() if "565656" in each]


def test_captures_work_without_containers(user: User) -> None:
    """Without containers captures are taken, and tasks refused."""
    port = free_port()
    words = ("--no-containers", "--engine", "simulated", "--gpus", "0", "--port", str(port))
    state = ("--state-dir", str(user.home / "other" / "state"))
    client = PolarnodeClient(f"http://127.0.0.1:{port}", patience_s=60)
    program = (sys.executable, "-B", "-m", "polarnode.cli", *words, *state)
    with user.running(*program, subordinate=False) as process:
        until(lambda: _serves(client), "it serves")
        with client.capture() as session:
            body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]}).encode()
            key = session.env["OPENAI_API_KEY"]
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            url = session.env["OPENAI_BASE_URL"] + "/chat/completions"
            urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
            session.reward = 1.0
        found = client.trajectory(session.session_id, turns="full")
        assert (found.outcome.status, found.reward, len(found.turns)) == ("completed", 1.0, 1)
        with pytest.raises(
            ClientError, match=r"this node runs no containers .--no-containers. and takes captures"
        ):
            client.submit({"instruction": "Do it.", "harness": "pi"})
        process.terminate()
        assert process.wait(60) == 0


def _serves(client: PolarnodeClient) -> bool:
    with suppress(Unreachable):
        return bool(client.status()["engine"]["hosts"][0]["state"] == "ready")
    return False


@pytest.fixture(scope="module")
def base_image(user: User, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base image of the machine's own store, which another test of this run has built."""
    store, file = store_at(default_state_dir()), user.home / "base.tar"
    subprocess.run(
        ["podman", "save", "--quiet", "--output", str(file), "localhost/polarnode/base:latest"],
        env=store.environment(),
        check=True,
    )
    file.chmod(0o644)
    return file
