"""Wrong inputs, as users make them: each is answered with one sentence that names what is wrong and what to do,
before an engine or a container is started.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from control_plane_parts import Plane, open_plane

from polarnode.cli.main import main as command

TASK = 'instruction = "x"\nharness = "pi"\n'
FILES = {
    "task.toml": TASK,
    "bad.toml": 'instruction = "x\n',
    "typo.toml": 'instruction = "x"\nharnes = { name = "pi" }\n',
    "clade.toml": 'instruction = "x"\nharness = "clade_code"\n',
    "number.toml": 'instruction = "x"\nharness = 3\n',
    "words.toml": f'{TASK}num_samples = "four"\n',
    "minus.toml": f"{TASK}num_samples = -3\n",
    "budget.toml": f"{TASK}budgets = {{ run_s = -5 }}\n",
    "judge.toml": f'{TASK}evaluator = {{ name = "comand" }}\n',
    "script.toml": f'{TASK}evaluator = {{ name = "command" }}\n',
    "none.toml": 'instruction = "x"\n',
    "empty.toml": "",
    "empty.jsonl": "",
    "trajectories.jsonl": json.dumps({"session_id": "4f", "traces": [], "harness": "pi", "arrays": "json"}),
    "other.jsonl": '{"a": 1}\n',
    "cut.jsonl": '{"session_id": "4f"}\n{"session_id": ',
    "list.jsonl": "[1]\n",
    "settings.toml": "run_limt = 3\n",
    "tp.toml": "tp = 2\n",
    "cpu.toml": "cpu = true\ntp = 2\n",
    "secure.toml": 'tls_cert = "a.pem"',
    "both.toml": "cpu = true\ngpus = [0]",
    "zero.toml": "run_limit = 0\n",
    "keep.toml": "keep_mb = -1\n",
    "reward.toml": f'{TASK}evaluator = {{ name = "command", config = {{ script = "true", reward_fle = "x" }} }}\n',
    "folder/README": "",
}
WRONG: tuple[tuple[str, str], ...] = (
    # commands and files
    ("serv", "there is no command serv: "),
    ("mrege", "did you mean merge?"),
    ("frobnicate", "there is no command frobnicate: see polarnode --help"),
    ("task.toml", "it is a file: polarnode run task.toml, or polarnode submit task.toml"),
    ("run --cpu nosuch.toml", "Path 'nosuch.toml' does not exist"),
    ("run --cpu bad.toml", "bad.toml: it is not TOML: Illegal character"),
    ("run task.toml", "choose where the model runs: --gpus 0-7, --gpus 0 or --cpu"),
    # tasks
    ("convert typo.toml", "harnes is not a known field: did you mean harness?"),
    (
        "convert clade.toml",
        "no harness is called clade_code; did you mean claude_code? there are: claude_code,",
    ),
    ("convert number.toml", "harness must be a name or an object, not a number"),
    ("convert words.toml", "num_samples must be a whole number, not a string"),
    ("convert minus.toml", "num_samples must be 1 to 4096, not -3"),
    ("convert budget.toml", "run_s must be more than 0 seconds"),
    ("convert judge.toml", "no evaluator is called comand; did you mean command? there are: command,"),
    ("convert script.toml", "script"),
    ("convert none.toml", "the task names no harness: give --harness (such as pi)"),
    ("convert empty.toml", "instruction is missing: it is required"),
    ("convert empty.jsonl", "empty.jsonl is empty: it holds no task"),
    ("convert folder", "folder is no known folder of tasks"),
    ("convert trajectories.jsonl", "it is a trajectory, not a task: polarnode inspect --from"),
    ("convert reward.toml", "evaluator.config.reward_fle is not a known field: did you mean reward_file?"),
    ("convert --split test task.toml", "task.toml has no splits: leave --split out"),
    ("convert --harness codx none.toml", "no harness is called codx; did you mean codex?"),
    ("run --cpu --samples -1 task.toml", "-1 is not in the range 1<=x<=4096"),
    # settings
    ("run --gpus 3-1 task.toml", "--gpus 3-1: 3-1 counts down; write 1-3"),
    ("run --gpus 0,0 task.toml", "--gpus 0,0: name each GPU once"),
    ("run --gpus zero task.toml", "--gpus zero: give numbers and ranges, such as 0-7 or 0,2"),
    ("run --gpus 0 --cpu task.toml", "--cpu and --gpus exclude each other: give one of them"),
    ("run --gpus 0-2 --tp 2 task.toml", "--tp 2 must divide the 3 GPUs given"),
    ("run --cpu --engine vllm task.toml", "--engine: 'vllm' must be an http or https address"),
    ("run --cpu --allow-import my/evals task.toml", "--allow-import 'my/evals' is no module: write"),
    ("run --cpu --base-image @debian task.toml", "--base-image '@debian' is no image's name"),
    (
        "run --cpu --record-requests task.toml/in task.toml",
        "task.toml is not a folder → set --record-requests",
    ),
    ("run --cpu --run-limit 0 task.toml", "--run-limit must be at least 1"),
    ("run --cpu --run-limit -4 task.toml", "--run-limit must be at least 1"),
    ("run --cpu --context-length -4 task.toml", "--context-length must be at least 1 token"),
    ("run --cpu --config settings.toml task.toml", "run_limt is not a known field: did you mean run_limit?"),
    ("run --cpu --config zero.toml task.toml", "Error: run_limit must be at least 1"),
    ("run --cpu --config keep.toml task.toml", "Error: keep_mb must be at least 1 MiB"),
    ("--cpu --host 0.0.0.0", "--host 0.0.0.0 can be reached from outside: set a bearer token"),
    ("--cpu --lora-rank -1", "--lora-rank must be 0 or more"),
    ("--cpu --adapter me", "--adapter me: write it as NAME=FOLDER"),
    ("--cpu --engine-arg foo", "--engine-arg foo: write it as NAME=VALUE, such as attention_backend=triton"),
    ("--engine simulated --engine-arg a=1", "--engine-arg are for the node's own SGLang"),
    ("run --cpu --engine-arg tp-size=2 task.toml", "--engine-arg tp_size is the node's own: use --tp"),
    ("--cpu --log postgresql://node:word@db/fleet", "--log must not hold a password, for command lines"),
    ("--cpu --log @nosuch.dsn", "--log @nosuch.dsn cannot be read"),
    (
        "--cpu --log host=db.example",
        "--host 127.0.0.1 is not reached by the other nodes of the log at db.example",
    ),
    ("--engine none", "--engine none runs no session: give --log"),
    # settings that belong together are all named as the first was written
    ("--cpu --tls-cert a.pem", "--tls-cert and --tls-key belong together"),
    ("--cpu --config secure.toml", "Error: tls_cert and tls_key belong together"),
    ("--cpu --tls-cert a.pem --tls-key a.key", "control plane: --tls-cert a.pem cannot be read"),
    ("fleet --log host=db.example", "say where the nodes run: --local N or --ray auto, one of them"),
    ("migrate", "name the log: give --log, or set POLARNODE_LOG"),
    ("--cpu --adapter me=folder", "--adapter: me cannot be served with --lora-rank 0: set it"),
    ("--cpu --lora-rank 8 --adapter me=folder", "--adapter me: there is no folder/adapter_config.json"),
    ("--cpu --label model=x", "--label model cannot be set"),
    ("run --config both.toml task.toml", "cpu and gpus exclude each other"),
    # what doctor knows
    ("--tls-cert a.pem --tls-key a.key doctor --cpu", "control plane: --tls-cert a.pem cannot be read"),
    ("run --cpu --config tp.toml task.toml", "--cpu takes neither --gpus nor tp"),
    ("run --config cpu.toml task.toml", "cpu takes neither gpus nor tp: leave them out"),
    ("--config tp.toml --engine simulated --cpu --tls-cert a", "--tls-cert and --tls-key belong together"),
    ("run --gpus 0 task.toml", "gpus: 0 found, but not GPU 0"),
    ("generate --gpus 0-7 --out out task.toml", "but not GPU 0, 1, 2, 3, 4, 5, 6, 7"),
    ("--gpus 0 --port 0", "gpus: 0 found, but not GPU 0"),
    ("run --cpu --tp 2 task.toml", "--cpu takes neither --gpus nor --tp"),
    (
        "run --cpu --context-length 70000 task.toml",
        "--context-length 70000: the model tiny was made for 65536",
    ),
    ("run --cpu --model Qwen/Qwen3-8B task.toml", "hf download Qwen/Qwen3-8B --local-dir /models/Qwen3-8B"),
    ("run --cpu --model folder task.toml", "--model folder: there is no config.json"),
    ("--cpu --port 0 --model /nowhere/x", "--model /nowhere/x: no such folder"),
    # what was written
    ("inspect --from other.jsonl", "line 1 of other.jsonl is no trajectory: give a trajectories.jsonl"),
    ("inspect --from list.jsonl", "line 1 of list.jsonl is no trajectory"),
    ("inspect --from empty.jsonl", "empty.jsonl is empty: it holds no trajectory"),
    ("inspect --from cut.jsonl", "line 2 of cut.jsonl: it is not JSON"),
    ("inspect --from task.toml", "line 1 of task.toml: it is not JSON"),
    ("inspect --from trajectories.jsonl 5", "0 sessions in trajectories.jsonl begin with 5"),
    ("inspect", "name a SESSION of the node, or give --from FILE"),
    ("replay folder", "folder has no recorded requests"),
    ("merge nosuch.jsonl", "File 'nosuch.jsonl' does not exist"),
    (
        "generate --cpu --out out --accept rewrd>=1 task.toml",
        "rewrd at column 1 is not a column: did you mean",
    ),
    ("generate --cpu --out out --accept __import__('os') task.toml", "Error: "),
    # no node
    ("submit task.toml --url http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
    ("watch --url http://127.0.0.1:9", "is the node running?"),
    ("status --url 127.0.0.1:8080", "127.0.0.1:8080 is no node's address: write http://127.0.0.1:8080"),
    ("tasks --url ftp://node", "ftp://node is no node's address: write http://node"),
    ("export --url http://127.0.0.1:9", "is the node running?"),
)
VARIABLES: tuple[tuple[str, str, str], ...] = (
    ("POLARNODE_RUN_LIMIT", "abc", "POLARNODE_RUN_LIMIT=abc: write it as in TOML, such as 8, true or [0, 1]"),
    ("POLARNODE_RUN_LIMIT", "0", "POLARNODE_RUN_LIMIT must be at least 1"),
    ("POLARNODE_TP", "0", "POLARNODE_TP 0 must divide"),
    ("POLARNODE_RUN_LIMIT", '"x"', "POLARNODE_RUN_LIMIT must be a whole number, not a string"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files, on a machine without GPUs; opening a node is a fault of the test."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)

    def opened(*_: Any, **__: Any) -> None:
        pytest.fail("a node was opened")

    for module in ("polarnode.cli.run", "polarnode.cli.serve"):
        monkeypatch.setattr(f"{module}.open_node", opened)
    checks: Any = importlib.import_module("polarnode.node.checks")
    monkeypatch.setattr(checks, "_count_gpus", lambda: 0)
    return tmp_path


def answer(*argv: str, **environment: str) -> Result:
    return CliRunner().invoke(command, argv, prog_name="polarnode", env=environment)


@pytest.mark.parametrize(("argv", "sentence"), WRONG)
def test_wrong_input_gets_remedy(argv: str, sentence: str) -> None:
    found = answer(*argv.split())
    assert found.exit_code in (1, 2)
    assert sentence in " ".join(found.output.split())
    assert "Traceback" not in found.output
    assert isinstance(found.exception, SystemExit)


@pytest.mark.parametrize(("variable", "text", "sentence"), VARIABLES)
def test_wrong_variable_is_named(variable: str, text: str, sentence: str) -> None:
    found = answer("run", "--cpu", "task.toml", **{variable: text})
    assert (found.exit_code, sentence in found.output) == (1, True), found.output


def test_unknown_variable_is_a_warning() -> None:
    found = answer("convert", "task.toml", POLARNODE_RUNLIMIT="5")
    assert found.exit_code == 0
    assert (
        "POLARNODE_RUNLIMIT is no setting and has no effect: did you mean POLARNODE_RUN_LIMIT?"
        in found.stderr
    )
    assert "warning" not in found.stdout


# ── of a node that runs ───────────────────────────────────────────────────────


async def asked(plane: Plane, *argv: str, token: str = "secret") -> Result:
    argv = (*argv, "--url", plane.url, *(("--token", token) if token else ()))
    return await trio.to_thread.run_sync(lambda: answer(*argv))


async def test_running_node_names_wrong_input(folder: Path) -> None:
    async with open_plane(folder / "journal") as plane:
        https = plane.url.replace("http://", "https://")
        for argv, sentence in (
            ("export --task nosuch", "nosuch"),
            ("export --format slme", "slme"),
            ("export --outcome foo", "foo"),
            ("watch --task nosuch", "nosuch"),
            ("inspect nosuch", "nosuch"),
        ):
            found = await asked(plane, *argv.split())
            assert (found.exit_code, sentence in found.output) == (1, True), (argv, found.output)
        found = await asked(plane, "watch", token="")
        assert "polarnode's commands take --token or POLARNODE_TOKEN" in found.output
        found = await asked(plane, "watch", token="wrong")
        assert "is another than this control plane's" in found.output
        found = await trio.to_thread.run_sync(lambda: answer("watch", "--url", https, "--token", "secret"))
        assert found.output == f"Error: {https} speaks plain HTTP: use {plane.url}\n"
