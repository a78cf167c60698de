"""The Tinker loop: with tinker's own types, the real loss, and weights that are served or are not."""

from pathlib import Path
from typing import Any

import pytest
from plugin_kit import run_program

import polarnode
from polarnode.core.errors import Refused
from polarnode.integrations.rollout_tasks import PluginSettings
from polarnode.integrations.tinker import adapter_weights, train

TINY = Path(polarnode.__file__).parent / "models" / "tiny"


@pytest.fixture(scope="module")
def looped() -> Any:
    return run_program("tinker_program.py", stdin={"model": str(TINY)})


def test_next_sessions_use_new_weights(looped: Any) -> None:
    served = [step["worst"] for step in looped["served"]["steps"]]
    frozen = [step["worst"] for step in looped["frozen"]["steps"]]
    assert len(served) == len(frozen) == 3
    assert max(served) < 1e-4
    assert frozen[0] < 1e-4
    assert min(frozen[1:]) > 1e-2  # what a policy that nobody serves looks like


def test_tinker_adapter_is_served_by_name(looped: Any) -> None:
    found = looped["adapted"]
    assert len(found["steps"]) == 2
    assert max(step["worst"] for step in found["steps"]) < 1e-4
    assert [version.rpartition("-")[2] for version in found["versions"]] == ["0", "1", "2"]
    assert [path.removeprefix("tinker://run/external_weights/") for path in found["saved"]] == found[
        "versions"
    ]
    assert set(found["adapters"]) == {"words"}


def test_cookbook_fetches_no_sampler_checkpoint(looped: Any) -> None:
    """tinker-cookbook 0.6.1: why `adapter_weights` saves an export."""
    assert "save_weights_external() instead" in looped["refused"]


def test_flat_batch_takes_no_step(looped: Any) -> None:
    """Rewards that are all equal, and the only session that is left: the weights before are served, and stay."""
    assert looped["flat"] == {"rewards": [1.0, 1.0], "moved": [0], "taught": []}


def test_adapter_without_task_is_refused() -> None:
    with pytest.raises(Refused, match="names no adapter"):
        adapter_weights(PluginSettings(), "m")


def test_only_usable_sampled_tokens_get_gradient(looped: Any) -> None:
    """Of each group three sessions are usable, the last in two rows: 2 groups x 42 tokens x 3 steps."""
    taught = looped["served"]["taught"]
    assert [each["gradient"] for each in taught] == [each["sampled"] for each in taught]
    assert sum(len(each["gradient"]) for each in taught) == 2 * 42 * 3
    assert len(taught) == 2 * 4 * 3


def test_lost_sessions_are_counted(looped: Any) -> None:
    """Lost sessions are counted, and are no reward of 0."""
    for step in looped["served"]["steps"]:
        assert (step["sessions"], step["unusable"], step["rows"], step["tokens"]) == (8, 2, 8, 84)
        assert "loss:sum" in step["metrics"]
    # advantages of a group sum to 0 over its usable sessions: two rows of the last have the same
    *others, main, beside = (max(each["advantages"], key=abs) for each in looped["served"]["taught"][:4])
    assert main == beside
    assert sum(others) + main == pytest.approx(0, abs=1e-6)


def test_sampled_tokens_are_in_one_datum(looped: Any) -> None:
    """Rewards 1, 0 and 0.5, and 0.75 for a lineage of the last: the baseline is 0.5."""
    assert [each["advantages"] for each in looped["shapes"]] == [
        [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5],
        [0, 0, -0.5, -0.5],
        [0, -0.5, -0.5, -0.5],
        [0, 0, 0],
        [0, 0, 0.25],
    ]
    assert [each["input"] for each in looped["shapes"][1:3]] == [[10, 11, 12, 20], [13, 14, 22, 23]]


def test_teacher_reverse_kl_joins_advantages(looped: Any) -> None:
    """thinking-machines-lab/tinker-cookbook 9dfcc3a2, `incorporate_kl_penalty` of distillation/train_on_policy.py."""
    assert looped["distilled"] == [[0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5], [0, 0.5, 0.5], [0, 0, 0.5]]


def test_step_takes_next_dataset_rows(looped: Any) -> None:
    tasks = [each["instruction"] for each in looped["served"]["tasks"]]
    assert tasks == ["task 0", "task 1", "task 2", "task 0", "task 1", "task 2"]


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(Refused, match="has no row"):
        next(train(None, [], weights=print, steps=1, settings=PluginSettings()))  # type: ignore[arg-type]
