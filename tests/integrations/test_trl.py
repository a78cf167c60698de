"""TRL's plug-in: weights before samples, a dataset's rows as tasks, sessions of any shape, and both of TRL's
GRPO trainers with it.
"""

import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_kit import run_program

import polarnode
from polarnode.core.errors import Refused
from polarnode.integrations import trl as plugin
from polarnode.integrations.rollout_tasks import PluginSettings
from polarnode.integrations.trl import NodeWorker, PolarnodeRollout, WeightPusher, node_reward

TINY = Path(polarnode.__file__).parent / "models" / "tiny"
TASK = {"harness": {"name": "pi"}}
WORST = "sampling/sampling_logp_difference/max"


@pytest.fixture(scope="module")
def trained() -> Any:
    """What the trainers themselves did, in a program of their own."""
    return run_program("trl_plugin_program.py", stdin={"model": str(TINY)})


# ── GRPOTrainer ───────────────────────────────────────────────────────────────


def test_next_samples_use_new_weights(trained: Any) -> None:
    """TRL compares recorded logprobs with its own before it trains on them."""
    pushed = [line[WORST] for line in trained["stock"]["log"] if WORST in line]
    frozen = [line[WORST] for line in trained["frozen"]["log"] if WORST in line]
    assert len(pushed) == len(frozen) == 2
    assert max(pushed) < 1e-4
    assert frozen[0] < 1e-4
    assert frozen[1] > 1e-2  # what a policy that nobody pushes looks like
    assert trained["stock"]["served_at_the_end"]
    assert not trained["frozen"]["served_at_the_end"]


def test_weights_are_pushed_once_per_rollout(trained: Any) -> None:
    """Four optimizer steps, two on each rollout: those before it, after two, and after all are served."""
    assert [name.rpartition("-")[2] for name in trained["stock"]["folders"]] == ["0", "1", "2"]


def test_peft_config_trains_only_adapter(trained: Any) -> None:
    """No checkpoint is written: four optimizer steps are three versions of an adapter, which the tasks name."""
    found = trained["adapter"]
    pushed = [line[WORST] for line in found["log"] if WORST in line]
    assert len(pushed) == 2
    assert max(pushed) < 1e-4
    assert found["served_at_the_end"]
    assert {each["adapter"] for each in found["tasks"]} == {"trainer"}
    assert [name.rpartition("-")[2] for name in found["adapters"]] == ["0", "1", "2"]
    assert found["folders"] == []
    assert {each["adapter"] for each in trained["stock"]["tasks"]} == {""}
    assert trained["stock"]["adapters"] == []


def test_row_is_task_group_is_one(trained: Any) -> None:
    """The column of a row is its task, and a group is one task."""
    tasks = trained["stock"]["tasks"]
    assert sorted(each["instruction"] for each in tasks) == ["do 0", "do 1", "do 2", "do 3"]
    assert {each["samples"] for each in tasks} == {4}
    assert {(each["temperature"], each["top_p"], each["top_k"]) for each in tasks} == {(0.9, 0.95, -1)}


def test_lost_session_is_no_zero_reward(trained: Any) -> None:
    """A lost session is no reward of 0, and rows that are left out are logged."""
    lines = [line for line in trained["stock"]["log"] if "reward" in line]
    assert {line["node/unusable"] for line in lines} == {0.25}
    assert {line["node/rows_left_out"] for line in lines} == {0.25}
    assert all(line["grad_norm"] > 0 for line in trained["stock"]["log"] if "grad_norm" in line)


# ── AsyncGRPOTrainer ──────────────────────────────────────────────────────────


def test_async_grpo_trains_usable_rows_once(trained: Any) -> None:
    """A group is three usable sessions: two of 12 sampled tokens, one of 12 and 6 in two rows. A step takes
    four rows, which is a group.
    """
    found = trained["asynchronous"]
    assert [len(each["old_log_probs"]) for each in found["seen"]] == [42, 42, 42]
    for each in found["seen"]:
        assert len(set(each["advantages"])) <= 3
        assert all(logprob < 0 for logprob in each["old_log_probs"])
    first = next(line for line in found["log"] if "ratio" in line)
    assert first["ratio"] == pytest.approx(1, abs=1e-4)
    assert first["node/unusable"] == 0.25
    assert found["sent"] == 4  # before the first rollout, and after each step


def test_failed_worker_gives_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARNODE_PATIENCE_S", "0")
    worker = NodeWorker([{"prompt": "do it"}], url="http://127.0.0.1:9", task=TASK, samples=2, groups=1)
    worker.start()
    try:
        assert worker._work is not None
        wait([worker._work], timeout=20)
        with pytest.raises(RuntimeError, match=r"rollouts on the node ended: .*127\.0\.0\.1:9"):
            worker.check_health(60)
    finally:
        worker.stop()


# ── without TRL ───────────────────────────────────────────────────────────────


def trainer_of(dataset: Any, **more: Any) -> Any:
    model = more.pop("model", SimpleNamespace(training=True, config=SimpleNamespace(name_or_path="tiny")))
    accelerator = SimpleNamespace(unwrap_model=lambda each: each)
    more |= {"add_callback": lambda _: None, "args": SimpleNamespace(output_dir="out")}
    return SimpleNamespace(
        train_dataset=dataset, eval_dataset=None, model=model, accelerator=accelerator, **more
    )


class Table:
    """A dataset as `datasets` has them."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows, self.column_names = rows, list(rows[0])

    def __getitem__(self, at: Any) -> Any:
        return [row[at] for row in self.rows] if isinstance(at, str) else self.rows[at]


def test_two_tasks_per_prompt_are_refused() -> None:
    dataset = Table(
        {"prompt": "do it", "polarnode": "{}"}, {"prompt": "do it", "polarnode": '{"metadata": {}}'}
    )
    with pytest.raises(Refused, match="two rows have the prompt do it and different tasks"):
        PolarnodeRollout(task=TASK)(["do it"], trainer_of(dataset))


def test_equal_prompts_are_one_row() -> None:
    """Columns beside the task differ, as an index does."""
    rows = [{"prompt": "do it", "extra_info": {"index": number}} for number in range(2)]
    columns = plugin._DatasetRows([Table(*rows)])
    assert columns.row("do it") == rows[0]
    assert columns.row("another") == {"prompt": "another"}
    with pytest.raises(Refused, match="two rows have the prompt"):
        plugin._DatasetRows([Table(*(row | {"instruction": str(row["extra_info"])} for row in rows))])


def test_streaming_dataset_with_tasks_is_refused() -> None:
    dataset = SimpleNamespace(column_names=["prompt", "extra_info"])
    with pytest.raises(Refused, match="streaming dataset"):
        PolarnodeRollout(task=TASK)(["do it"], trainer_of(dataset))


def test_invalid_push_settings_are_refused() -> None:
    with pytest.raises(Refused, match="disk, tensor or distributed"):
        PolarnodeRollout(task=TASK, weights="nccl")  # type: ignore[arg-type]
    with pytest.raises(Refused, match="give its address"):
        PolarnodeRollout(task=TASK, weights="distributed")
    with pytest.raises(Refused, match="use one of bfloat16"):
        PolarnodeRollout(task=TASK, dtype="int8")
    with pytest.raises(Refused, match="give model="):
        WeightPusher(settings=PluginSettings()).push(0, [])


def test_reward_function_passes_node_reward() -> None:
    logged: dict[str, float] = {}
    found = node_reward(
        ["", "", ""], reward=[0.5, None, 1.0], unusable=[0, 1, 0], rows_left_out=[0, 0, 3], prompts=[],
        log_metric=logged.__setitem__,
    )  # fmt: skip
    assert found == [0.5, None, 1.0]
    assert logged == {"node/unusable": 1 / 3, "node/rows_left_out": 1.0}


def test_version_names_differ_between_runs() -> None:
    """Versions of two runs have different names, and count alike."""
    one, other = (WeightPusher(settings=PluginSettings(run="r")) for _ in range(2))
    assert one.version(3) != other.version(3)
    assert (one.number(one.version(3)), one.number("0"), one.number(other.version(3))) == (3, 0, 0)


def test_tensors_are_cast_to_served_types() -> None:
    torch = pytest.importorskip("torch")
    weights = WeightPusher(settings=PluginSettings(), dtype="bfloat16")
    cast = [weights._cast_tensor(each) for each in (torch.zeros(2), torch.zeros(2, dtype=torch.int64))]
    assert [each.dtype for each in cast] == [torch.bfloat16, torch.int64]


def test_plug_in_imports_no_trainer() -> None:
    check = (
        "import sys; import polarnode.integrations.trl;"
        "print([name for name in ('torch', 'trl', 'transformers', 'trio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert plugin.FOLDER == "polarnode-weights"
