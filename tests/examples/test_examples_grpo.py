"""examples/grpo, what of it is pure: the loss against a naive one, rows as tensors, rows made anew of their
text, curves and tables.

The loop itself, on a node, is in live/test_grpo_live.py.
"""

import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from attrs import evolve
from trainers_kit import group_of, make_turn, publish

from polarnode.core.arrays import floats, ids
from polarnode.core.codec import dump_json
from polarnode.core.conversation import Answer, Message, TextPart, ToolCall
from polarnode.core.trajectory import ForkedFrom, NewMessages, Outcome, Trajectory, Turn, VersionSpan
from polarnode.groups import Group
from polarnode.merge.builders import per_request, prefix_merging
from polarnode.node.config import TINY_MODEL

ROOT = Path(__file__).parents[2]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and transformers warn of themselves
    sys.path.insert(0, str(ROOT))
    from examples.grpo import __main__ as command
    from examples.grpo import ablations, tasks, train, trees
    from examples.grpo.curve import at, smooth, svg
    from examples.grpo.decoder import Decoder
    from examples.grpo.learner import Learner, Recipe, objective
    from examples.grpo.own_node import free_port
    from examples.grpo.retold import retold
    from examples.grpo.rows import Row, batch, micro, shared

    sys.path.remove(str(ROOT))

pytestmark = pytest.mark.filterwarnings("default")
RECIPE = Recipe(lr=1e-3, scale_lr=1e-3, final_lr=1e-3, inner=1)


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(TINY_MODEL, RECIPE)


def fresh(**more: Any) -> Learner:
    return Learner(TINY_MODEL, replace(RECIPE, **more))


def rows(learner: Learner, *advantages: float, prompt: int = 40) -> list[Row]:
    """Rows that begin alike and go on differently, their logprobs as the policy has them."""
    dice = torch.Generator().manual_seed(0)
    head = torch.randint(0, 2000, (prompt,), generator=dice).tolist()
    made = []
    for number, advantage in enumerate(advantages):
        tail = torch.randint(0, 2000, (12 + 5 * number,), generator=dice).tolist()
        mask = [0] * prompt + [int(3 <= place < 7 or place > 9) for place in range(len(tail))]
        made.append(Row(head + tail, mask, naive(learner, head + tail), advantage, 0.01))
    return made


def naive(learner: Learner, sequence: list[int]) -> list[float]:
    """The logprob of every token in one plain pass; 0 of the first."""
    with torch.no_grad():
        found = torch.log_softmax(learner.model(torch.tensor([sequence])).logits[0].float(), -1)
    return [0.0, *(float(found[place - 1, token]) for place, token in enumerate(sequence) if place)]


# ── rows as tensors ───────────────────────────────────────────────────────────


def test_shared_prefix_precedes_trained_tokens() -> None:
    one = Row([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], [0.0] * 5)
    assert shared([one]) == 2  # the token that the first sample follows is in the tensors
    assert shared([one, replace(one, ids=[1, 9, 3, 4, 5])]) == 1
    assert shared([one, replace(one, ids=[7, 2, 3, 4, 5])]) == 0


def test_batch_is_padded_and_masked() -> None:
    made = batch(
        [
            Row([1, 2, 3, 4], [0, 0, 0, 1], [0, 0, 0, -0.5], 1.0, 0.5),
            Row([1, 2, 5, 6, 7], [0, 0, 0, 1, 1], [0, 0, 0, -1, -2]),
        ],
        2,
    )
    assert made.prompt.tolist() == [[1, 2]]
    assert made.ids.tolist() == [[3, 4, 0], [5, 6, 7]]
    assert made.real.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert made.mask.tolist() == [[False, True, False], [False, True, True]]
    assert made.logprobs.tolist() == [[0, -0.5, 0], [0, -1, -2]]
    assert (made.advantages.tolist(), made.weights.tolist()) == ([[1, 1, 0], [0, 0, 0]], [0.5, 1.0])


def test_micro_batches_group_similar_lengths() -> None:
    """Micro-batches have every row once, and like lengths together."""
    given = [Row([0] * size, [0] * size, None) for size in (9, 3, 7, 1, 5)]
    assert [[len(row.ids) for row in few] for few in micro(given, 2)] == [[1, 3], [5, 7], [9]]


def test_shared_prompt_logprobs_match_plain(learner: Learner) -> None:
    given = rows(learner, 1.0, -1.0, 0.5)
    made = batch(given, shared(given))
    with torch.no_grad():
        own = learner.own(made)
    for place, row in enumerate(given):
        at_once = [
            value
            for value, trained in zip(own[place].tolist(), made.mask[place, 1:].tolist(), strict=True)
            if trained
        ]
        assert at_once == pytest.approx(
            [value for value, trained in zip(row.logprobs or (), row.mask, strict=True) if trained], abs=1e-4
        )


# ── the loss ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("away", "advantage"),
    [(0.0, 1.0), (0.1, 1.0), (0.5, 1.0), (-0.5, 1.0), (0.5, -1.0), (-0.5, -1.0), (2.0, -1.0)],
)
def test_gradient_matches_capped_ppo(away: float, advantage: float) -> None:
    """Against the objective as the paper has it, differentiated by torch; beyond the cap the weight is the
    cap.
    """
    own = torch.tensor([[-1.0]], requires_grad=True)
    given = batch([Row([1, 2], [0, 1], [0.0, -1.0 - away], advantage, 0.25)], 0)
    loss, _, worst = objective(own, given, RECIPE)
    loss.backward()
    mine, plain = own.grad, torch.tensor([[-1.0]], requires_grad=True)
    ratio = (plain - (-1.0 - away)).exp()
    if float(ratio.detach()) <= RECIPE.cap:
        (
            -0.25
            * torch.minimum(ratio * advantage, ratio.clamp(1 - RECIPE.clip, 1 + RECIPE.clip) * advantage)
        ).sum().backward()
        expected = float(plain.grad) if plain.grad is not None else 0.0
    else:
        expected = -0.25 * RECIPE.cap * advantage
    assert mine is not None
    assert float(mine) == pytest.approx(expected, abs=1e-6)
    assert worst == pytest.approx(abs(away), abs=1e-6)


def test_step_matches_naive_computation() -> None:
    """The same AdamW step from the same weights, row by row, without a cache; the gradient through the prompt
    with it.
    """
    one, other = fresh(through_prompt=True), fresh()
    given = rows(one, 1.0, -1.0)
    done = one.learn(given)
    loss = torch.zeros(())
    for row in given:
        found = torch.log_softmax(other.model(torch.tensor([list(row.ids)])).logits[0].float(), -1)
        loss = loss - sum(
            (
                row.advantage * row.weight * found[at - 1, row.ids[at]]
                for at in range(1, len(row.ids))
                if row.mask[at]
            ),
            torch.zeros(()),
        )
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(other.model.parameters(), RECIPE.clip_norm))
    assert done.norm == pytest.approx(norm, rel=1e-3)
    assert done.loss == pytest.approx(float(loss.detach()), abs=1e-4)
    assert done.worst < 1e-4
    assert (done.rows, done.tokens, done.updates) == (2, sum(row.trained for row in given), 1)


def test_micro_batches_change_nothing(learner: Learner) -> None:
    given = rows(learner, 1.0, -1.0, 0.5, 0.25)
    norms = [fresh(micro=size).learn(given).norm for size in (1, 4)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_step_favours_the_better_row() -> None:
    one = fresh(inner=3)
    given = rows(one, 1.0, -1.0)
    one.learn(given)
    gained = [
        sum(
            (a - b) * m
            for a, b, m in zip(naive(one, list(row.ids)), row.logprobs or (), row.mask, strict=True)
        )
        for row in given
    ]
    assert gained[0] > 0 > gained[1]


def test_rows_without_advantage_change_nothing() -> None:
    one = fresh()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    done = one.learn(rows(one, 0.0, 0.0))
    assert (done.updates, done.rows) == (0, 2)
    assert all(torch.equal(before[name], value) for name, value in one.model.state_dict().items())


def test_missing_logprobs_use_starting_policy() -> None:
    """Logprobs that nobody recorded are the policy's own before the batch."""
    one = fresh(inner=2)
    done = one.learn([replace(row, logprobs=None) for row in rows(one, 1.0, -1.0)])
    assert done.worst < 1e-6
    assert math.isfinite(done.norm)


# ── rows made anew ────────────────────────────────────────────────────────────

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call><|im_end|>'
READ: dict[str, Any] = {"name": "read", "description": "Reads a file.", "parameters": {"type": "object"}}
ODD = CALL.replace('": ', '":')
RESULT = "\n<|im_start|>user\n<tool_response>\nkiwi\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def session(learner: Learner, first: str) -> Trajectory:
    """Two turns, of a harness with a tool: a call spelled as `first`, and an answer in words."""
    heard = NewMessages(
        messages=(Message(role="user", text="Read a.txt."),), tools=dump_json([READ]).decode()
    )
    messages, tools = [{"role": "user", "content": "Read a.txt."}], [{"type": "function", "function": READ}]
    prompt = learner.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    call = ToolCall(id="c1", name="read", arguments='{"path": "a.txt"}')
    one = turn(
        learner,
        None,
        prompt,
        first,
        new_messages=heard,
        answer=Answer(parts=(call,), finish_reason="tool_calls"),
    )
    told = NewMessages(messages=(Message(role="tool", text="kiwi", call_id="c1"),))
    two = turn(
        learner,
        one,
        RESULT,
        "Done.<|im_end|>",
        new_messages=told,
        answer=Answer(parts=(TextPart(text="Done."),), finish_reason="stop"),
    )
    built = prefix_merging((one, two), {})
    outcome = Outcome(status="completed", exit_code=0)
    return Trajectory(
        session_id="s",
        task_id="t",
        group_id="t",
        sample_index=0,
        outcome=outcome,
        reward=1.0,
        traces=built.traces,
        turns=(one, two),
    )


def turn(learner: Learner, parent: Turn | None, prompt: str, sampled: str, **more: Any) -> Turn:
    delta, sample = ids(learner.tokenizer.encode(prompt)), ids(learner.tokenizer.encode(sampled))
    before = 0 if parent is None else parent.end
    return Turn(
        session_id="s",
        index=0 if parent is None else parent.index + 1,
        provider="openai_chat",
        lineage=0,
        parent=None if parent is None else parent.index,
        kind="root" if parent is None else "extend",
        reason="first",
        prompt_delta=delta,
        prompt_length=before + len(delta),
        sampled=sample,
        logprobs=floats([-0.5] * len(sample)),
        version_spans=(VersionSpan(version="0", start=0, end=len(sample)),),
        **more,
    )


def test_template_spelled_row_round_trips(learner: Learner) -> None:
    found = session(learner, CALL)
    (trace,) = found.traces
    again, mask = retold(trace, found, learner.tokenizer)
    assert again[: len(trace.token_ids)] == list(trace.token_ids)
    assert mask[: len(trace.token_ids)] == list(trace.loss_mask)
    # the template ends its last line
    assert learner.tokenizer.decode(again[len(trace.token_ids) :]).strip() == ""


def test_misspelled_row_trains_unsampled_tokens(learner: Learner) -> None:
    found = session(learner, ODD)
    (trace,) = found.traces
    again, mask = retold(trace, found, learner.tokenizer)
    assert again[: len(trace.token_ids)] != list(trace.token_ids)
    trained = learner.tokenizer.decode([token for token, one in zip(again, mask, strict=True) if one])
    assert CALL.removesuffix("<|im_end|>") in trained
    assert ODD not in trained


def test_per_request_rows_have_same_samples(learner: Learner) -> None:
    found = session(learner, CALL)
    apart = per_request(found.turns, {}).traces
    assert len(apart) == 2
    assert sum(trace.loss_mask.count(1) for trace in apart) == found.traces[0].loss_mask.count(1)


# ── tasks, curves, tables ─────────────────────────────────────────────────────


def test_step_tasks_are_reproducible_and_distinct() -> None:
    first = tasks.of_step(0, seed=1, prompts=4, kinds=("write", "copy"))
    assert first == tasks.of_step(0, seed=1, prompts=4, kinds=("write", "copy"))
    assert [task.kind for task in first] == ["write", "copy", "write", "copy"]
    assert not set(map(str, first)) & set(
        map(str, tasks.of_step(1, seed=1, prompts=4, kinds=("write", "copy")))
    )
    assert tasks.held_out(2, ("follow",)) == tasks.held_out(2, ("follow",))


def test_task_is_accepted_by_node() -> None:
    from polarnode.core.codec import read_task

    (task,) = tasks.of_step(0, seed=0, prompts=1, kinds=("follow",))
    spec = read_task(tasks.spec(task, name="step-0-0", harness="pi", samples=8))
    assert (spec.task_id, spec.num_samples, spec.builder.name) == ("step-0-0", 8, "prefix_merging")
    assert {file.path: file.text for file in spec.runtime.files} == dict(task.files)


def test_curve_has_point_per_value() -> None:
    picture = ElementTree.fromstring(svg({"a & b": [(1, 0.5), (2, 0.75)]}, title="t", x="minutes", goal=0.8))
    assert len([each for each in picture if each.tag.endswith("circle")]) == 2
    assert len([each for each in picture if each.tag.endswith("polyline")]) == 2
    assert at((0, 1), 2)[1] < at((0, 0), 2)[1]
    assert smooth([0.0, 1.0, 1.0], 2) == [0.0, 0.5, 1.0]


def test_options_become_plan_and_recipe() -> None:
    given = command.parsed(
        ["--kinds", "write", "--steps", "3", "--overlap", "--lr", "0.5", "--stop-at", "0.8"]
    )
    plan = command.plan_of(given)
    assert (plan.kinds, plan.steps, plan.overlap, plan.stop_at, plan.builder) == (
        ("write",),
        3,
        True,
        0.8,
        "prefix_merging",
    )
    assert command.recipe_of(given) == replace(Recipe(), lr=0.5)


def test_table_has_line_per_run() -> None:
    steps = [
        {
            "reward": reward,
            "updates": 4,
            "sessions": 64,
            "rows": 64,
            "tokens": 3000,
            "worst": 1e-6,
            "waited_s": 50.0,
            "learned_s": 9.0,
            "pushed_s": 0.2,
        }
        for reward in (0.5, 0.7)
    ]
    summary = command.outcome({"reward": 0.5}, steps, {"reward": 0.75}, train.Plan()) | {
        "training_s": 120.0,
        "load_before": 0.5,
    }
    unseen = command.outcome({}, steps, {}, train.Plan()) | {"training_s": 120.0, "load_before": 0.5}
    made = ablations.table(
        {("faithful", 0): {"summary": summary}, ("per_request", 1): {"summary": unseen}}
    ).splitlines()
    assert len(made) == 4
    assert made[3].startswith("| per_request | 1 | - | 0.600 | - |")
    assert made[2] == "| faithful | 0 | 0.500 | 0.600 | 0.750 | 2 | 128 | 128 | 8 | 6,000 | 120 | 18 | 0.5 |"


def test_free_ports_are_valid_ports() -> None:
    assert all(0 < port < 65536 for port in (free_port(), free_port()))


def test_stepwise_sampling_matches_plain_logits(learner: Learner) -> None:
    """Two sessions of different lengths behind one prompt, the shorter one started later."""
    dice = torch.Generator().manual_seed(1)
    head, one, other = (torch.randint(0, 2000, (size,), generator=dice).tolist() for size in (30, 6, 4))
    decoder = Decoder(learner.model, head, 2, 16)
    for place in range(6):
        rows = [0, 1] if place >= 2 else [0]
        ids = [one[place], other[place - 2]][: len(rows)]
        found = decoder.step(
            torch.tensor(ids), torch.tensor([place, place - 2][: len(rows)]), torch.tensor(rows)
        )
    with torch.no_grad():
        for row, sequence in enumerate((one, other)):
            plain = learner.model(torch.tensor([head + sequence])).logits[0, -1]
            assert torch.allclose(found[row], plain, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "word"),
    [(["--nodes", "0"], "must be 1 to 64"), (["--nodes", "2", "--url", "http://x"], "leave it out")],
)
def test_impossible_fleet_is_refused(given: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A fleet that can not be is refused."""
    own, other = command.parsed(["--nodes", "2"]), command.parsed(["--url", "http://x"])
    assert (own.nodes, command.mark_of(own)) == (2, "")
    assert command.mark_of(other) != command.mark_of(other), "each run on a node that runs has its own names"
    with pytest.raises(SystemExit):
        command.parsed(given)
    assert word in capsys.readouterr().err


# ── trees ─────────────────────────────────────────────────────────────────────


def a_tree() -> list[Group]:
    """Two sessions, of which the first failed, and a fork of that one before its last turn, which did not."""

    def session(name: str, last: int, reward: float, **more: Any) -> Trajectory:
        first = make_turn(0, None, [1, 2], [3, 4])
        return evolve(
            publish([first, make_turn(1, first, [5], [last, 7])], reward=reward, **more), session_id=name
        )

    fork = ForkedFrom(session_id="one", turn=1, got=1, by="replay")
    roots = session("one", 6, 0.0), session("two", 6, 1.0)
    return [group_of(*roots), group_of(session("three", 8, 1.0, forked_from=fork))]


def test_tree_tokens_train_once_with_advantage(tmp_path: Path) -> None:
    plan = train.Plan(per_session=1, estimator="leave_one_out")
    run = train.Run(None, None, plan, tmp_path)  # type: ignore[arg-type]
    one, two, three = run.rows(a_tree())
    assert [list(row.mask) for row in (one, two, three)] == [
        [0, 0, 1, 1, 0, 1, 1],
        [0, 0, 1, 1, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 1],  # its parent trains what it inherited
    ]
    failed, forked = list(one.advantage), list(three.advantage)  # type: ignore[arg-type]
    assert failed[5] == -1.0  # against the fork: the same state, and the other end
    assert forked[5] == 1.0
    assert failed[2] == failed[3]  # the mean of all that came of the first turn, against the other session
    assert -1.0 < failed[2] < 0.0
    assert all(row.teaches for row in (one, two, three))


def test_run_ends_at_token_budget(tmp_path: Path) -> None:
    run = train.Run(None, None, train.Plan(tokens=100), tmp_path)  # type: ignore[arg-type]
    assert not run.enough()
    run._trained = 100
    assert run.enough()


def test_groups_and_trees_share_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def remember(given: Any, arm: str, seed: int, changes: Any) -> Any:
        asked[arm] = replace(command.plan_of(given), seed=seed, **changes)
        raise SystemExit

    monkeypatch.setattr(ablations, "one", remember)
    for arm in trees.ARMS:
        with pytest.raises(SystemExit):
            trees.main(["--arms", arm, "--tokens", "900"])
    flat, tree = asked["flat"], asked["tree"]
    assert (flat.samples, flat.per_session, flat.tokens) == (4, 0, 900)
    assert (tree.samples, tree.per_session, tree.tokens) == (6, 2, 900)
    with pytest.raises(SystemExit):
        command.parsed(["--per-session", "2", "--overlap"])
