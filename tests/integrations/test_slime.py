"""slime's plug-in on a control plane, in a process that has slime's classes; and its reward hook.

The classes are written down from THUDM/slime 624b824: `slime/utils/types.py` (Sample, the fields that are read
here), `slime/rollout/base_types.py`, `slime/utils/data.py` (Dataset). radixark/miles 31f1ca9 has the same.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from client_kit import Node, open_node
from journal_writes import publish_end
from trainers_kit import one_row, session_of_two_rows, session_without_rows

from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.integrations import slime as plugin
from polarnode.journal import queries

LOST = Outcome(status="interrupted", reason="the node was restarted")

# ── slime's classes ───────────────────────────────────────────────────────────


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__ | {
            "status": self.status.value,
            "prefix_cache_info": asdict(self.prefix_cache_info),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Sample":
        made = Sample(**{name: value for name, value in data.items() if name in Sample.__dataclass_fields__})
        made.status = Status(data["status"])
        made.prefix_cache_info = PrefixCacheInfo(**data["prefix_cache_info"])
        return made


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[list[Sample]]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class Dataset:
    def __init__(self, path: str, tokenizer: Any, processor: Any, max_length: Any, **keys: Any) -> None:
        assert (tokenizer, processor, max_length, keys["prompt_key"]) == (None, None, None, "prompt")
        self.samples = [Sample(prompt=line) for line in Path(path).read_text().split()]


@dataclass
class DataSource:
    """The groups of a data set, as `RolloutDataSource.get_samples` gives them."""

    prompts: Iterator[str]
    per_prompt: int = 2
    groups: int = 0

    def get_samples(self, count: int) -> list[list[Sample]]:
        found = []
        for prompt in itertools.islice(self.prompts, count):
            numbers = range(self.groups * self.per_prompt, (self.groups + 1) * self.per_prompt)
            found.append(
                [
                    Sample(
                        group_index=self.groups,
                        index=n,
                        prompt=prompt,
                        metadata={"row": n},
                        train_metadata={},
                    )
                    for n in numbers
                ]
            )
            self.groups += 1
        return found


@pytest.fixture(params=["slime", "miles"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The modules of slime or of miles that the plug-in uses."""

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    name = str(request.param)
    contents: dict[str, dict[str, Any]] = {
        "utils.types": {"Sample": Sample},
        "rollout.base_types": {
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
        },
        "utils.data": {"Dataset": Dataset},
        "utils.processing_utils": {"load_tokenizer": lambda path, trust_remote_code: Tokenizer()},
    }
    for module in (name, f"{name}.utils", f"{name}.rollout"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for path, values in contents.items():
        module = ModuleType(f"{name}.{path}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"{name}.{path}", module)
    plugin._tokenizer.cache_clear()
    return name


def arguments(**more: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "rollout_temperature": 0.8,
        "rollout_top_p": 1.0,
        "hf_checkpoint": "tiny",
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "custom_reward_post_process_path": "polarnode.integrations.slime.reward_post_process",
    }
    return SimpleNamespace(**(given | more))


# ── a node that ends each task as a test says ─────────────────────────────────

Play = Callable[[TaskSpec], list[Trajectory]]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with open_node(tmp_path / "journal.sqlite") as opened:
        (tmp_path / "task.json").write_text('{"harness": {"name": "pi"}}')
        for name, value in {
            "URL": opened.url,
            "TOKEN": "secret",
            "TASK": str(tmp_path / "task.json"),
        }.items():
            monkeypatch.setenv(f"POLARNODE_{name}", value)
        plugin._opened.cache_clear()
        yield opened
        if plugin._opened.cache_info().currsize:
            plugin._opened().close()
            plugin._opened.cache_clear()


@pytest.fixture
def playing(node: Node) -> Iterator[Callable[[Play], list[TaskSpec]]]:
    """Ends each task that the node takes with the sessions that the test's function returns, in order."""
    stopped, threads, seen = threading.Event(), [], []

    async def end(task_id: str, play: Play) -> None:
        task = await node.plane.journal.reader.query(queries.task, task_id)
        sessions = play(task.spec) if task is not None else []  # None until it is on disk
        if task is None or not sessions:
            return
        seen.append(task.spec)
        node.plane.service.live.discard(task_id)
        for place, session in enumerate(sessions):
            own = f"{task_id}-{place}"
            turns = tuple(evolve(turn, session_id=own) for turn in session.turns)
            for turn in turns:
                node.plane.journal.writer.record_turn(turn)
            publish_end(
                node.plane.journal,
                evolve(session, session_id=own, task_id=task_id, sample_index=place, turns=turns),
            )
        await node.plane.journal.writer.flush()

    def run(play: Play) -> None:
        while not stopped.wait(0.005):
            for task_id in sorted(node.plane.service.live):
                node.here.do(end, task_id, play)

    def begin(play: Play) -> list[TaskSpec]:
        threads.append(threading.Thread(target=run, args=(play,)))
        threads[-1].start()
        return seen

    yield begin
    stopped.set()
    for thread in threads:
        thread.join()


def rollout(args: Any, prompts: Any) -> Any:
    source = DataSource(iter(prompts))
    return plugin.generate_rollout(args, 0, source), source


# ── training ──────────────────────────────────────────────────────────────────


def test_batch_lists_sessions_in_groups(package: str, playing: Callable[[Play], list[TaskSpec]]) -> None:
    seen = playing(lambda spec: [one_row(), session_of_two_rows()])
    output, _ = rollout(arguments(), ["a", "b", "never"])
    assert [[len(session) for session in group] for group in output.samples] == [[1, 2], [1, 2]]
    rows = [sample for group in output.samples for session in group for sample in session]
    assert [(each.group_index, each.index, each.rollout_id) for each in rows] == [
        (0, 0, 0), (0, 1, 1), (0, 1, 1), (1, 2, 2), (1, 3, 3), (1, 3, 3),
    ]  # fmt: skip
    first = rows[0]
    assert (first.prompt, first.response, first.metadata["row"]) == ("a", "20 21 13 14 22 23 24", 0)
    assert (first.weight_versions, first.status, first.train_metadata) == (
        ["7", "7", "8"],
        Status.COMPLETED,
        {},
    )
    assert type(first.rollout_routed_experts).__module__ == {"slime": "torch", "miles": "numpy"}[package]
    assert sorted(spec.instruction for spec in seen) == ["a", "b"]
    assert {(spec.num_samples, spec.sampling.temperature, spec.sampling.top_k) for spec in seen} == {
        (2, 0.8, -1)
    }
    assert output.metrics["rollout/polarnode/sessions"] == 4


@pytest.mark.parametrize("package", ["slime"], indirect=True)
@pytest.mark.usefixtures("package")
def test_lost_sessions_have_stand_ins(
    playing: Callable[[Play], list[TaskSpec]],
) -> None:
    """A session that the machine lost is no reward of 0, and neither is its group."""
    again: dict[str, int] = {}

    def play(spec: TaskSpec) -> list[Trajectory]:
        again[spec.instruction] = again.get(spec.instruction, 0) + 1
        lost = session_without_rows("interrupted")
        if spec.instruction == "part":
            return [one_row(reward=3.0), lost]
        return [one_row(), one_row()] if again[spec.instruction] == 3 else [lost, lost]

    playing(play)
    output, source = rollout(arguments(), ["part", "all", "never"])
    [[kept], [stand_in]] = output.samples[0]
    assert (kept.reward, kept.remove_sample) == (3.0, False)
    assert (stand_in.reward, stand_in.remove_sample, stand_in.rollout_id) == (3.0, True, 1)
    assert output.samples[1][0][0].group_index == 1
    assert (source.groups, again) == (2, {"part": 1, "all": 3})
    found = {name.rpartition("/")[2]: value for name, value in output.metrics.items()}
    assert (found["groups_run_again"], found["lost_to_the_machine"]) == (2, 5)
    assert plugin.reward_post_process(arguments(), [kept, stand_in]) == ([3.0, 3.0], [0.0, 0.0])


@pytest.mark.parametrize("package", ["slime"], indirect=True)
@pytest.mark.usefixtures("package")
def test_uninformative_groups_are_replaced(
    playing: Callable[[Play], list[TaskSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = ModuleType("filters")
    filters.keep = lambda args, samples: SimpleNamespace(keep=samples[0].prompt != "filtered")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "filters", filters)

    def play(spec: TaskSpec) -> list[Trajectory]:
        return (
            [one_row(reward=None)] * 2
            if spec.instruction == "unscored"
            else [one_row(), session_of_two_rows()]
        )

    playing(play)
    args = arguments(dynamic_sampling_filter_path="filters.keep")
    output, source = rollout(args, ["unscored", "filtered", "a", "b", "never"])
    assert [group[0][0].prompt for group in output.samples] == ["a", "b"]
    assert source.groups == 4
    # two are played at once: both may be over before the limit of 32 is looked at
    with pytest.raises(PolarnodeError, match=r"gave 3[34] groups up for a batch of 2; the last: too few"):
        rollout(args, itertools.repeat("unscored"))
    with pytest.raises(PolarnodeError, match="no more samples"):
        rollout(args, ["a"])


@pytest.mark.parametrize("package", ["slime"], indirect=True)
@pytest.mark.usefixtures("package")
def test_groups_stay_in_progress_between_calls(node: Node, playing: Callable[[Play], list[TaskSpec]]) -> None:
    open_ = threading.Event()
    seen = playing(
        lambda spec: [one_row(), one_row()] if spec.instruction != "slow" or open_.is_set() else []
    )
    args, source = arguments(over_sampling_batch_size=3), DataSource(iter(["slow", "a", "b", "c", "d", "e"]))
    first = plugin.generate_rollout(args, 0, source)
    assert [group[0][0].prompt for group in first.samples] == ["a", "b"]
    assert len(node.plane.service.live) == 1
    open_.set()
    while not any(spec.instruction == "slow" for spec in seen):
        time.sleep(0.005)
    second = plugin.generate_rollout(args, 1, source)
    assert "slow" in [group[0][0].prompt for group in second.samples]


@pytest.mark.parametrize("package", ["slime"], indirect=True)
@pytest.mark.usefixtures("package")
def test_trainer_exit_ends_running_groups(node: Node, playing: Callable[[Play], list[TaskSpec]]) -> None:
    playing(lambda spec: [] if spec.instruction == "slow" else [one_row(), one_row()])
    args = arguments(rollout_batch_size=1, over_sampling_batch_size=2)
    plugin.generate_rollout(args, 0, DataSource(iter(["slow", "a", "b"])))
    assert node.plane.service.live
    plugin._opened().close()
    deadline = time.monotonic() + 10
    while node.plane.service.live and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not node.plane.service.live


@pytest.mark.parametrize("package", ["slime"], indirect=True)
@pytest.mark.parametrize(
    ("more", "path", "word"),
    [
        ({"custom_rm_path": "mine.rm"}, "--custom-rm-path", "runs and scores"),
        ({"partial_rollout": True}, "--partial-rollout", "runs and scores"),
        ({"reward_key": "score"}, "--reward-key", "is a number"),
        ({"apply_chat_template": True}, "--apply-chat-template", "instruction"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p", "must be 1"),
        (
            {"custom_reward_post_process_path": None},
            "--custom-reward-post-process-path",
            "reward_post_process",
        ),
    ],
)
@pytest.mark.usefixtures("package")
def test_ignored_argument_is_refused(more: dict[str, Any], path: str, word: str) -> None:
    with pytest.raises(Refused, match=word) as refused:
        plugin.generate_rollout(arguments(**more), 0, DataSource(iter(["a"])))
    assert refused.value.path == path


# ── evaluation ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("package", ["slime"], indirect=True)
@pytest.mark.usefixtures("package")
def test_evaluation_skips_unscored_sessions(
    playing: Callable[[Play], list[TaskSpec]], tmp_path: Path
) -> None:
    def play(spec: TaskSpec) -> list[Trajectory]:
        assert (spec.num_samples, spec.sampling.temperature, spec.sampling.top_k) == (2, 0.0, 5)
        other = (
            session_without_rows("error") if spec.instruction == "lost" else session_of_two_rows(reward=0.0)
        )
        return [one_row(reward=1.0), other]

    seen = playing(play)
    (tmp_path / "rows").write_text("good lost")
    keys = {"prompt_key": "prompt", "input_key": "prompt", "label_key": None, "tool_key": None}
    data = SimpleNamespace(
        name="held_out", path=tmp_path / "rows", metadata_key="metadata", temperature=0.0, top_p=None, top_k=5,
        n_samples_per_eval_prompt=2, **keys,
    )  # fmt: skip
    output = plugin.generate_rollout(arguments(eval_datasets=[data]), 0, None, evaluation=True)
    assert output.data["held_out"]["rewards"] == [1.0, 0.0]
    assert output.data["held_out"]["truncated"] == [False, False]
    assert [spec.instruction for spec in seen].count("lost") == 3


# ── rewards ───────────────────────────────────────────────────────────────────


def row(group: int, session: int, reward: float, **more: Any) -> Sample:
    own = {"session_reward": more.pop("of_session", reward), "row_reward": reward}
    return Sample(
        group_index=group,
        index=session,
        rollout_id=session,
        reward=reward,
        metadata={"polarnode": own},
        **more,
    )


def test_session_counts_once_in_group() -> None:
    """slime 624b824, `ray/rollout.py`, `_post_process_rewards`: without the hook unequal counts are normalised
    over the whole batch.
    """
    batch = [row(0, 0, 1.0), row(0, 1, 0.0), row(0, 1, 0.0), row(1, 2, 5.0), row(1, 3, 4.0)]
    raw, normalised = plugin.reward_post_process(arguments(), batch)
    assert raw == [1.0, 0.0, 0.0, 5.0, 4.0]
    assert normalised == pytest.approx([0.7071, -0.7071, -0.7071, 0.7071, -0.7071], abs=1e-4)


def test_lineage_is_compared_with_sessions() -> None:
    """A lineage is compared with its group's sessions, and stand-ins count as nothing."""
    batch = [
        row(0, 0, 1.0),
        row(0, 1, 0.0),
        row(0, 1, 2.0, of_session=0.0),
        row(0, 2, 9.0, remove_sample=True),
    ]
    args = arguments(grpo_std_normalization=False)
    assert plugin.reward_post_process(args, batch) == ([1.0, 0.0, 2.0, 9.0], [0.5, -0.5, 1.5, 0.0])
    assert plugin.reward_post_process(arguments(), batch[:1])[1] == [0.0]
    assert plugin.reward_post_process(arguments(), [row(0, 0, 0.1), row(0, 1, 0.1)])[1] == [0.0, 0.0]
    batch[2].reward = 0.0  # in miles rows have their session's reward, and their own beside it
    assert plugin.reward_post_process(args, batch)[1] == [0.5, -0.5, 1.5, 0.0]
    raw, kept = plugin.reward_post_process(arguments(advantage_estimator="ppo"), batch)
    assert raw == kept == [1.0, 0.0, 2.0, 9.0]
