"""examples/grpo with a teacher: its loop on a stand-in for a node that samples with the weights it was given and has
a teacher score each row, the loss of a token of its own advantage, and what starts the node.

The run with a real node and harness is in docs/learning.md.
"""

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from sampling_node import StandIn

from polarnode.cli import fleet, main
from polarnode.core.arrays import floats
from polarnode.core.codec import read_task
from polarnode.groups import Group
from polarnode.node.config import TINY_MODEL, TeacherConfig
from polarnode.node.config_sources import read_config

ROOT = Path(__file__).parents[2]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and transformers warn of themselves
    sys.path.insert(0, str(ROOT))
    from examples.grpo import __main__ as command
    from examples.grpo import own_node
    from examples.grpo.learner import Learner, Recipe, objective
    from examples.grpo.rows import Row, batch
    from examples.grpo.train import Plan, Run, reverse_kl

    sys.path.remove(str(ROOT))

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two are slower than one on a model of this size, and far slower beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Taught(StandIn):
    """A client of a node whose teacher is surer of what the policy thinks likely."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.teacher = copy.deepcopy(self.model)
        with torch.no_grad():
            self.teacher.model.norm.weight.mul_(1.5)
        self.specs: list[Any] = []
        self.down = False

    def submit(self, given: dict[str, Any]) -> None:
        self.specs.append(read_task(given))

    def groups(self, *_: Any, **__: Any) -> Iterator[Group]:  # type: ignore[override]
        for spec in self.specs:
            group = evolve(self.group(spec), task_id=spec.task_id, acknowledge=self.acked)
            yield (
                group.holding(self.scored(each) for each in group.trajectories)
                if spec.carry.teacher
                else group
            )

    def acked(self) -> None:
        """Its groups come once."""

    @torch.no_grad()
    def scored(self, session: Any) -> Any:
        traces = []
        for trace in session.traces:
            tokens = torch.tensor([list(trace.token_ids)])
            said = self.teacher(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            logprobs = [0.0, *said.tolist()]
            kept = [one if trained else 0.0 for one, trained in zip(logprobs, trace.loss_mask, strict=True)]
            traces.append(evolve(trace, teacher_logprobs=None if self.down else floats(kept)))
        return evolve(session, traces=tuple(traces))


def test_student_approaches_teacher_each_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    node = Taught(TINY_MODEL)
    plan = Plan(steps=2, prompts=2, samples=4, teacher="big")
    run = Run(node, Learner(TINY_MODEL, Recipe()), plan, tmp_path)  # type: ignore[arg-type]
    steps = run.train()
    assert {spec.carry.teacher for spec in node.specs} == {"big"}
    assert all(step["worst"] < 1e-3 and step["updates"] == 4 for step in steps)
    assert node.version == "2"
    first, last = [step["reverse_kl"] for step in steps]
    assert first > 0.02
    assert last < first * 0.75
    node.down = True
    assert (
        run.rows(
            [group.holding(map(node.scored, group.trajectories)) for group in [node.group(node.specs[0])]]
        )
        == []
    )


def test_gradient_is_proportional_to_advantage() -> None:
    row = Row([1, 2, 3, 4], [0, 1, 0, 1], [0.0, -1.0, 0.0, -2.0], [0.0, 0.5, 9.0, -0.25], 0.1)
    own = torch.tensor([[-1.0, -5.0, -2.0]], requires_grad=True)
    loss, _, _ = objective(own, batch([row], 0), Recipe())
    loss.backward()
    assert own.grad is not None
    assert own.grad[0].tolist() == pytest.approx([-0.05, 0.0, 0.025])
    assert reverse_kl([row, Row([1], [0], [0.0])]) == pytest.approx(-9.25 / 2)
    assert row.teaches
    assert not Row([1, 2], [0, 1], [0.0, -1.0], [0.0, 0.0]).teaches


def test_teacher_is_checkpoint_or_last_weights(tmp_path: Path) -> None:
    assert command.checkpoint(TINY_MODEL) == TINY_MODEL
    with pytest.raises(SystemExit, match="has no weights: make a teacher with `make learn`"):
        command.checkpoint(tmp_path)
    folder = tmp_path / "weights" / "12"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert command.checkpoint(tmp_path) == folder
    given = command.parsed(["--teacher", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds the teacher, and a run empties its folder"):
        command.run(given, Plan(), Recipe())
    assert (folder / "config.json").exists()
    given = command.parsed(["--teacher", str(tmp_path)])
    assert command.plan_of(given).teacher == command.TEACHER
    assert command.plan_of(command.parsed([])).teacher == ""


def test_own_node_gets_its_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def refuse(command: list[str], **_: Any) -> Any:
        asked.append(command)
        raise OSError("no node here")

    monkeypatch.setattr(own_node.subprocess, "Popen", refuse)
    with (
        pytest.raises(OSError, match="no node here"),
        own_node.own_node(tmp_path, run_limit=2, teachers={"big": TINY_MODEL}),
    ):
        pass
    config = read_config(toml=Path(asked[0][asked[0].index("--config") + 1]).read_text())
    assert config.teachers["big"] == TeacherConfig(model=str(TINY_MODEL.resolve()), cpu=True)


def test_nodes_of_one_run_share_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are those of `polarnode fleet`, and the log is no one else's, who would have to run its tasks."""
    asked: list[tuple[list[str], dict[str, str]]] = []

    def refuse(command: list[str], env: dict[str, str], **_: Any) -> Any:
        asked.append((command, env))
        raise OSError("no node here")

    @contextmanager
    def log() -> Iterator[str]:
        yield "host=/run/own"

    monkeypatch.setattr(own_node.subprocess, "Popen", refuse)
    monkeypatch.setattr(own_node, "own_log", log)
    monkeypatch.setenv("POLARNODE_LOG", "host=others")
    for nodes in (1, 2):
        with (
            pytest.raises(OSError, match="no node here"),
            own_node.own_node(tmp_path, run_limit=3, nodes=nodes, model=TINY_MODEL),
        ):
            pass
    (alone, of_alone), (several, of_several) = asked
    assert "--port" in alone
    assert "POLARNODE_LOG" not in of_alone
    assert of_several["POLARNODE_LOG"] == "host=/run/own"
    assert several[3] == "fleet"
    assert main.make_context("polarnode", alone[3:]).params["port"] > 0
    assert fleet.fleet.make_context("fleet", several[4:]).params["local"] == 2
