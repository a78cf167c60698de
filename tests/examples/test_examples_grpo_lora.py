"""examples/grpo with an adapter: what a step changes, and that peft reads what it saves."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from plugin_kit import run_program
from safetensors.torch import load_file

from polarnode.node.config import TINY_MODEL

ROOT = Path(__file__).parents[2]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and transformers warn of themselves
    sys.path.insert(0, str(ROOT))
    from examples.grpo.learner import Learner, Recipe
    from examples.grpo.lora import MODULES
    from examples.grpo.rows import Row

    sys.path.remove(str(ROOT))

pytestmark = pytest.mark.filterwarnings("default")


def own(learner: Learner, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = learner.model(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def test_new_adapter_is_neutral_until_step(tmp_path: Path) -> None:
    """An adapter begins as nothing, and a step changes it alone, as PEFT reads it."""
    plain = Learner(TINY_MODEL, Recipe())
    learner = Learner(TINY_MODEL, Recipe(lora=4, alpha=8.0, lora_lr=1e-2, inner=2))
    assert learner.adapter is not None
    ids = torch.randint(0, 2000, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()
    before = [own(learner, row) for row in ids]
    assert before[0] == pytest.approx(own(plain, ids[0]), abs=1e-6)
    mask = [0] * 20 + [1] * 20
    rows = [
        Row(row, mask, [0.0, *known], advantage, 0.01)
        for row, known, advantage in zip(ids, before, (1.0, -1.0), strict=True)
    ]
    done = learner.learn(rows)
    assert done.updates == 2
    assert done.worst < 1e-4
    after = [own(learner, row) for row in ids]
    assert sum(after[0][19:]) > sum(before[0][19:])
    assert sum(after[1][19:]) < sum(before[1][19:])

    folder = learner.save(tmp_path / "adapter")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert len(load_file(folder / "adapter_model.safetensors")) == 2 * len(MODULES) * 4  # layers
    again = run_program(
        "peft_program.py",
        stdin={"model": str(TINY_MODEL), "rows": [[str(folder), ids[0]], ["", ids[0]]]},
    )
    assert again[0] == pytest.approx(after[0], abs=1e-4)
    assert again[1] == pytest.approx(before[0], abs=1e-4)  # the base is what it was
    assert max(abs(one - two) for one, two in zip(after[0], before[0], strict=True)) > 1e-2


def test_same_seed_gives_same_adapter() -> None:
    """The same seed gives the same adapter, and base weights never move."""
    one, other = (Learner(TINY_MODEL, Recipe(lora=2)) for _ in range(2))
    assert one.adapter is not None
    assert other.adapter is not None
    for name, tensor in one.adapter.tensors().items():
        assert torch.equal(tensor, other.adapter.tensors()[name]), name
    trained = {id(each) for each in one.adapter.parameters()}
    assert {id(each) for each in one.model.parameters() if each.requires_grad} == trained
