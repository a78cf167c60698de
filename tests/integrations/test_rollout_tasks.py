"""What the trainers' plug-ins share: settings, the task of a dataset's row, and waiting for its group."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import trainers_kit
from attrs import evolve
from client_kit import Node, open_client, open_node
from journal_samples import make_spec
from trainers_kit import group_of, one_row, session_of_two_rows, session_without_rows

from polarnode.client import ClientError, Event, Unreachable
from polarnode.core.conversation import Sampling
from polarnode.core.errors import Refused
from polarnode.core.task import CarrySpec, GroupSpec
from polarnode.core.weights import AdaptersState, WeightsStatus
from polarnode.groups import Group, facts_of, judged
from polarnode.integrations.rollout_tasks import (
    WHOLE_GROUP_FIELDS,
    NodeRollouts,
    PluginSettings,
    SessionLost,
    only,
    plugin_settings,
    rollout_groups,
    task_of,
    taught,
)

HARNESS = {"harness": {"name": "pi"}}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with open_node(tmp_path / "journal.sqlite") as opened:
        yield opened


def settings_of(node: Node) -> PluginSettings:
    return PluginSettings(url=node.url, token="secret", patience_s=10.0)


# ── settings ──────────────────────────────────────────────────────────────────


def test_trainer_configuration_overrides_environment(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text('harness = { name = "pi" }\n')
    settings = plugin_settings(
        {"url": "http://10.0.0.7:8080", "run": None, "task": str(tmp_path / "task.toml")},
        {"POLARNODE_URL": "http://127.0.0.1:1", "POLARNODE_TOKEN": "t", "POLARNODE_RUN": "grpo-3"},
    )
    assert settings == PluginSettings(
        url="http://10.0.0.7:8080", token="t", run="grpo-3", template={"harness": {"name": "pi"}}
    )
    assert "'t'" not in repr(settings)


@pytest.mark.parametrize(
    ("given", "path", "word"),
    [
        ({"adress": "x"}, "$.adress", "it takes url"),
        ({"task": "/no/such.toml"}, "$.task", "no task file"),
        ({"patience_s": "soon"}, "$.patience_s", "number of seconds"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], path: str, word: str) -> None:
    with pytest.raises(Refused, match=word) as refused:
        plugin_settings(given, {})
    assert refused.value.path == path


# ── a row's task ──────────────────────────────────────────────────────────────


def test_row_task_overrides_the_template() -> None:
    settings = PluginSettings(template=HARNESS | {"budgets": {"run_s": 60, "max_turns": 5}}, run="r")
    own = {"instruction": "do it", "budgets": {"run_s": 90}}
    spec = task_of(settings, {"extra_info": {"polarnode": json.dumps(own)}, "prompt": "unused"}, samples=3)
    assert (spec.instruction, spec.num_samples, spec.harness.name) == ("do it", 3, "pi")
    assert (spec.budgets.run_s, spec.budgets.max_turns) == (90, 5)
    assert spec.task_id is not None
    assert spec.task_id.startswith("r-")


def test_tables_give_nulls_and_arrays() -> None:
    """As pandas reads a Parquet file: absent fields of an object are None, lists are arrays."""
    own = {
        "instruction": "do it",
        "group_id": None,
        "runtime": {"artifacts": np.array(["out.txt"], dtype=object), "image": None},
        "budgets": {"max_turns": np.int64(7)},
    }
    spec = task_of(PluginSettings(template=HARNESS), {"polarnode": own}, group_id="uid-1")
    assert (spec.runtime.artifacts, spec.budgets.max_turns, spec.group_id) == (("out.txt",), 7, "uid-1")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "fix it"},
        {"raw_prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fix it"}]},
        {"prompt": np.array([{"role": "user", "content": "fix it"}], dtype=object)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "fix it"}]}]},
        {"prompt": "", "question": "fix it"},
    ],
)
def test_prompt_becomes_the_instruction(row: dict[str, Any]) -> None:
    assert task_of(PluginSettings(template=HARNESS), row).instruction == "fix it"


def test_trainer_sampling_comes_last() -> None:
    settings = PluginSettings(template=HARNESS | {"sampling": {"temperature": 0.2, "max_tokens": 9}})
    sampling = task_of(settings, {"prompt": "x"}, sampling={"temperature": 1.0, "top_k": None}).sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k) == (1.0, 9, -1)


def test_harness_sampling_changes_no_logprob() -> None:
    """With what the trainer's and the task's sampling leave out, also where a trainer names none."""
    asked = Sampling(
        temperature=0.0, top_p=0.5, top_k=2, min_p=0.1, stop=("x",),
        frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5,
    )  # fmt: skip
    uncut = Sampling(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, stop=("x",),
        frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0,
    )  # fmt: skip
    spec = task_of(PluginSettings(template=HARNESS), {"prompt": "x"})
    assert spec.sampling.over(asked) == uncut
    warm = task_of(PluginSettings(template=HARNESS | {"sampling": {"temperature": 0.7}}), {"prompt": "x"})
    assert warm.sampling.over(asked) == evolve(uncut, temperature=0.7)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1), ("frequency_penalty", 1.0), ("repetition_penalty", 1.1)],
)
@pytest.mark.parametrize("place", ["template", "row"])
def test_own_sampling_cut_is_refused(name: str, value: float, place: str) -> None:
    own = {"sampling": {name: value}}
    settings = PluginSettings(template=HARNESS | (own if place == "template" else {}))
    row = {"prompt": "x", "polarnode": own if place == "row" else {}}
    with pytest.raises(Refused, match=f"sampling.{name} of the task is {value}, and this trainer") as refused:
        task_of(settings, row, sampling={"temperature": 1.0})
    assert refused.value.path == f"$.sampling.{name}"
    assert task_of(settings, row, sampling={name: value}).sampling == evolve(
        task_of(PluginSettings(template=HARNESS), {"prompt": "x"}).sampling, **{name: value}
    )


@pytest.mark.parametrize(
    ("row", "template", "path"),
    [
        ({"prompt": "x"}, {}, "$.harness"),
        ({"id": 3}, HARNESS, "$.instruction"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, HARNESS, "$.instruction"),
        ({"polarnode": "[1]"}, HARNESS, "$.polarnode"),
        ({"polarnode": {"budgets": {"run_s": -1}}, "prompt": "x"}, HARNESS, "$.budgets.run_s"),
        ({"prompt": "x"}, HARNESS | {"num_samples": 1, "group": {"fork": {}}}, "$.num_samples"),
    ],
)
def test_invalid_row_is_refused_with_path(row: dict[str, Any], template: Any, path: str) -> None:
    with pytest.raises(Refused) as refused:
        task_of(PluginSettings(template=template), row)
    assert refused.value.path == path


@pytest.mark.parametrize("group", [{"drop_uniform_reward": True}, {"early_stop_min": 4}, {"min_usable": 2}])
def test_group_settings_need_a_group(group: dict[str, Any]) -> None:
    """Where a sample is a task of its own they would do nothing, or drop every sample."""
    settings = PluginSettings(template={**HARNESS, "group": group})
    [name] = group
    with pytest.raises(
        Refused, match=rf"group.{name} cannot do what it says.*Leave it out, and let"
    ) as error:
        task_of(settings, {"prompt": "x"})
    assert error.value.path == f"$.group.{name}"
    instead = dict.fromkeys(WHOLE_GROUP_FIELDS, "use the trainer's own")
    with pytest.raises(Refused, match="and use the trainer's own"):
        task_of(settings, {"prompt": "x"}, samples=4, instead=instead)
    assert getattr(task_of(settings, {"prompt": "x"}, samples=4).group, name) == group[name]
    # an evaluation wants every result
    assert task_of(settings, {"prompt": "x"}, evaluation=True, instead=instead).group == GroupSpec()
    allowed = {"group": {"min_usable": 1, "drop_uniform_reward": False, "max_staleness": 1}}
    assert task_of(PluginSettings(template=HARNESS | allowed), {"prompt": "x"}).group.max_staleness == 1


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GroupSpec(max_staleness=0), "is not usable: stale: 1 weight updates behind"),
        (GroupSpec(drop_uniform_reward=True), "was dropped: uniform reward"),
    ],
)
def test_unusable_session_is_not_given(spec: GroupSpec, why: str) -> None:
    session = evolve(one_row(), staleness=1)
    group = judged(spec, [facts_of(session)], task_id="t", group_id="g").holding([session])
    with pytest.raises(SessionLost, match=why):
        only(group)
    assert only(evolve(group, state="complete", members=())) == session


def test_kept_group_is_judged_when_taken() -> None:
    """As slime's groups are that ended in an earlier call: its oldest trained token is of version 7."""
    session = evolve(one_row(), staleness=1)
    spec = GroupSpec(max_staleness=1)
    group = judged(spec, [facts_of(session)], task_id="t", group_id="g").holding([session])

    class Served:
        async def weights(self) -> WeightsStatus:
            return WeightsStatus(version="9", versions=("7", "8", "9"))

        async def adapters(self) -> AdaptersState:
            return AdaptersState()

    async def taken() -> Group:
        rollouts = NodeRollouts(PluginSettings())
        rollouts.client = Served()  # type: ignore[assignment]
        return await rollouts.delivered(group)

    assert group.usable == (session,)
    assert anyio.run(taken).usable == ()


def test_tree_is_refused_for_flat_groups() -> None:
    template = HARNESS | {"group": {"fork": {"per_session": 3}}}
    with pytest.raises(Refused, match="compares each session with the mean of its group") as refused:
        task_of(PluginSettings(template=template), {"prompt": "x"}, samples=8)
    assert refused.value.path == "$.group.fork"


# ── rollouts ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_group_has_all_its_trajectories(node: Node, backend: str) -> None:
    async def main() -> None:
        async with NodeRollouts(settings_of(node)) as rollouts, anyio.create_task_group() as tasks:

            async def publish() -> None:
                await accepted(rollouts, "t")
                await anyio.to_thread.run_sync(node.publish, "t-0", "t-1")

            tasks.start_soon(publish)
            group = await rollouts.group(make_spec(task_id="t", num_samples=2))
            assert [each.session_id for each in group.trajectories] == ["t-0", "t-1"]

    anyio.run(main, backend=backend)


def test_session_without_teacher_scores_is_unusable(node: Node) -> None:
    async def main() -> None:
        async with NodeRollouts(settings_of(node)) as rollouts, anyio.create_task_group() as tasks:

            async def publish() -> None:
                await accepted(rollouts, "t")
                await anyio.to_thread.run_sync(node.publish, "t-0", "t-1")

            tasks.start_soon(publish)
            carry = CarrySpec(teacher="policy")
            group = await rollouts.group(make_spec(task_id="t", num_samples=2, carry=carry))
            assert [each.why for each in group.members] == ["lost: no logprobs of its teacher"] * 2
            assert group.usable == ()

    anyio.run(main)
    both = group_of(trainers_kit.taught(one_row()), trainers_kit.taught(session_of_two_rows(sample_index=1)))
    assert taught(both) == both
    half = group_of(
        trainers_kit.taught(one_row()),
        session_of_two_rows(sample_index=1),
        lost=[session_without_rows(sample_index=2)],
    )
    assert [member.why for member in taught(half).members] == [None, "lost: no logprobs of its teacher", None]


def test_lost_session_is_no_reward(node: Node) -> None:
    async def main() -> None:
        async with NodeRollouts(settings_of(node)) as rollouts, anyio.create_task_group() as tasks:

            async def publish() -> None:
                await accepted(rollouts, "t")
                await anyio.to_thread.run_sync(lambda: node.publish("t-0", status="interrupted"))

            tasks.start_soon(publish)
            with pytest.raises(SessionLost, match="t-0 was lost: interrupted"):
                await rollouts.session(make_spec(task_id="t", num_samples=1))

    anyio.run(main)


def test_cancelled_caller_cancels_its_task(node: Node) -> None:
    async def main() -> None:
        async with NodeRollouts(settings_of(node)) as rollouts:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rollouts.group, make_spec(task_id="t", num_samples=1))
                await accepted(rollouts, "t")
                assert "t" in node.plane.service.live
                tasks.cancel_scope.cancel()
            assert "t" not in node.plane.service.live

    anyio.run(main)


def test_blocking_rollouts_stay_in_order(node: Node) -> None:
    """Blocking rollouts are in order, and work inside a running event loop."""
    specs = [make_spec(task_id=name, num_samples=1) for name in ("b", "a")]

    async def main() -> None:
        async with anyio.create_task_group() as tasks, NodeRollouts(settings_of(node)) as other:

            async def publish() -> None:
                for name in ("a", "b"):
                    await accepted(other, name)
                    await anyio.to_thread.run_sync(lambda name=name: node.publish(f"{name}-0", task_id=name))

            tasks.start_soon(publish)
            groups = await anyio.to_thread.run_sync(rollout_groups, settings_of(node), specs)
            assert [group.task_id for group in groups] == ["b", "a"]

    anyio.run(main)

    async def inside() -> None:
        assert [group.task_id for group in rollout_groups(settings_of(node), specs)] == ["b", "a"]

    anyio.run(inside)


def test_refused_task_ends_the_others(node: Node) -> None:
    first, second = make_spec(task_id="t", num_samples=1), make_spec(task_id="u", num_samples=1)
    with open_client("sync", node.url, token="secret") as client:
        client.submit(make_spec(task_id="u", num_samples=2))
    with pytest.raises(ClientError) as refused:
        rollout_groups(settings_of(node), [first, second])
    assert refused.value.status == 409
    assert "t" not in node.plane.service.live


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_many_tasks_share_one_stream(tmp_path: Path, backend: str) -> None:
    """A trainer that submits each sample has thousands in progress. They end in another order, and whoever
    reads for the others is cancelled again and again.
    """
    names = [f"t{number}" for number in range(60)]

    async def main(node: Node) -> None:
        ended: dict[str, Group] = {}
        scopes = {name: anyio.CancelScope() for name in names}

        async def run(rollouts: NodeRollouts, name: str) -> None:
            with scopes[name]:
                ended[name] = await rollouts.group(make_spec(task_id=name, num_samples=1))

        async with NodeRollouts(settings_of(node)) as rollouts, anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(run, rollouts, name)
            for name in names:
                await accepted(rollouts, name)
            for name in names[:20]:  # the first of them reads
                scopes[name].cancel()
                await anyio.lowlevel.checkpoint()
            for name in reversed(names[20:]):
                await anyio.to_thread.run_sync(lambda name=name: node.publish(f"{name}-0", task_id=name))
        assert sorted(ended) == sorted(names[20:])
        assert all([one.task_id for one in ended[name].trajectories] == [name] for name in ended)
        assert node.plane.service.live == set(names[20:]), "the cancelled ones are cancelled on the node"

    with open_node(tmp_path / "journal.sqlite", connections=24) as node:  # 18 of them streams
        anyio.run(main, node, backend=backend)


def test_task_ended_long_ago_is_found(node: Node) -> None:
    spec = make_spec(task_id="old", num_samples=1)

    async def main() -> None:
        async with NodeRollouts(settings_of(node)) as rollouts:
            await rollouts.client.submit(spec, idempotency_key="old")
            await anyio.to_thread.run_sync(lambda: node.publish("old-0", task_id="old"))
            for _ in range(2):
                assert (await rollouts.group(spec)).task_id == "old"

    anyio.run(main)


def test_dead_node_fails_all_at_once(tmp_path: Path) -> None:
    """Not one after another, each with its own patience."""

    async def main(node: Node, gone: Callable[[], None]) -> None:
        settings = PluginSettings(url=node.url, token="secret", patience_s=1.0)
        failed: list[str] = []

        async def run(name: str) -> None:
            try:
                await rollouts.group(make_spec(task_id=name, num_samples=1))
            except Unreachable:
                failed.append(name)

        async with NodeRollouts(settings) as rollouts:
            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:
                    for number in range(40):
                        tasks.start_soon(run, f"t{number}")
                    for number in range(40):
                        await accepted(rollouts, f"t{number}")
                    await anyio.to_thread.run_sync(gone)
            assert len(failed) == 40

    stack = ExitStack()
    node = stack.enter_context(open_node(tmp_path / "journal.sqlite"))
    with stack:
        anyio.run(main, node, stack.close)


class OnlyAGap:
    """A stream in which the group's event is gone."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.read = 0

    async def __anext__(self) -> Event:
        self.read += 1
        if self.read > 1:
            await anyio.sleep_forever()
        await anyio.to_thread.run_sync(lambda: self.node.publish("t-0"))
        return Event(seq=99, kind="gap", key="gap", data={"after": 1, "oldest": 99})

    async def aclose(self) -> None:
        """Nothing is open."""


def test_group_among_pruned_events_is_found(node: Node) -> None:
    """Whoever waits asks for its own task."""

    async def main() -> None:
        rollouts = NodeRollouts(settings_of(node))
        rollouts._events = OnlyAGap(node)  # type: ignore[assignment]
        async with rollouts:
            with anyio.fail_after(20):
                assert (await rollouts.group(make_spec(task_id="t", num_samples=1))).task_id == "t"

    anyio.run(main)


async def accepted(rollouts: NodeRollouts, task_id: str) -> None:
    """Wait until the node has the task."""
    with anyio.fail_after(30):
        while True:
            try:
                await rollouts.client.task_status(task_id)
                return
            except ClientError as error:
                if error.status != 404:
                    raise
            await anyio.sleep(0.005)
