"""NeMo Gym's agent server, without a node: what is read, what a task becomes, what is answered, how rollouts
are waited for.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, evolve, field
from captures_kit import Desk, in_thread, open_capture_node
from control_plane_parts import Caller
from fakes_engine import ScriptedEngine
from gym_models import (
    AggregateMetrics,
    FunctionCall,
    FunctionCallOutput,
    GymResponse,
    VerifyResponse,
    masked_by_nemo_rl,
    message_log,
)
from httpx import post
from journal_samples import make_trajectory
from plane_kit import ANYWHERE, CONTEXT, answers
from trainers_kit import one_row, session_of_two_rows, session_without_rows

from polarnode.client import ClientError, Unreachable
from polarnode.core.conversation import Json
from polarnode.core.errors import PolarnodeError, Refused
from polarnode.core.task import TaskSpec
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.http.server import open_server
from polarnode.integrations.nemo_gym import answers as writing
from polarnode.integrations.nemo_gym import app
from polarnode.integrations.nemo_gym.app import LostPolicy, PromptWatch, Rollouts, create_gym_app
from polarnode.integrations.nemo_gym.requests import (
    PLACEHOLDER,
    GymRequest,
    TaskTemplate,
    read_responses_request,
    read_run_request,
)
from polarnode.journal import queries

TASK: "dict[str, Json]" = {"harness": {"name": "shell", "command": ["true"]}}
CALLING = 'Let me see.|<tool_call>|\n{"name": "look", "arguments": {"path": "a.txt"}}\n|</tool_call>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def run_body(**more: Any) -> "dict[str, Any]":
    return {"responses_create_params": {"input": "Say a word."}} | more


# ── what is read ──────────────────────────────────────────────────────────────


def test_input_messages_become_one_instruction() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Say "}, {"type": "input_text", "text": "a word."}],
        },
    ]
    params = {"input": messages, "instructions": "You are an agent.", "store": False, "user": "u"}
    assert read_responses_request(params).instruction == "You are an agent.\n\nBe brief.\n\nSay a word."


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"input": [{"role": "assistant", "content": "Yes?"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": " "}, "input"),
        ({"input": "x", "tools": [{"type": "function", "name": "look"}]}, "tools"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "temperature": "hot"}, "temperature"),
        ({}, "input"),
    ],
)
def test_unsupported_input_is_refused_with_path(params: "dict[str, Any]", path: str) -> None:
    for read, whole in (
        (read_responses_request, params),
        (read_run_request, {"responses_create_params": params}),
    ):
        with pytest.raises(Refused) as refused:
            read(whole)
        assert (
            refused.value.path == f"$.{path}"
            if read is read_responses_request
            else f"$.responses_create_params.{path}"
        )


def test_only_named_rollout_is_recognised() -> None:
    """A rollout with a name is known again, and one without is not."""
    assert read_run_request(run_body(_ng_rollout_id="7-1")).key == "nemo-gym:7-1"
    assert read_run_request(run_body(_ng_rollout_id="7-1", _ng_attempt_index=2)).key == "nemo-gym:7-1-a2"
    # they begin anew with each collection
    assert read_run_request(run_body(_ng_task_index=7, _ng_rollout_index=1)).key is None
    with pytest.raises(Refused, match="_ng_rollout_id must be"):
        read_run_request(run_body(_ng_rollout_id="../x"))


# ── a task of a row ───────────────────────────────────────────────────────────


def filled(template: "dict[str, Json]", body: "dict[str, Any]") -> TaskSpec:
    return TaskTemplate(value=TASK | template).task(read_run_request(body))


def test_row_fills_template_places() -> None:
    template: dict[str, Json] = {
        "instruction": "In {{ row.repo }}: {{input}}",
        "runtime": {"image": "{{row.meta.image}}", "memory_mb": "{{row.meta.mb}}"},
        "evaluator": {"name": "command", "config": {"script": "test {{row.expected}} = ${HOME} {{.State}}"}},
        "metadata": {"id": "{{row.id}}"},
    }
    body = run_body(
        repo="r",
        id=[1, 2],
        expected={"a": 1},
        meta={"image": "localhost/x:1", "mb": 512},
        _ng_task_index=3,
        _ng_rollout_id="3-0",
    )
    spec = filled(template, body)
    assert spec.instruction == "In r: Say a word."
    assert (spec.runtime.image, spec.runtime.memory_mb) == ("localhost/x:1", 512)
    assert spec.evaluator.config["script"] == 'test {"a":1} = ${HOME} {{.State}}'
    assert spec.metadata == {"id": [1, 2], "_ng_task_index": 3, "_ng_rollout_id": "3-0"}


def test_row_sampling_overrides_template() -> None:
    params = {"input": "x", "temperature": 0.5, "max_output_tokens": 9}
    spec = filled({"sampling": {"temperature": 1.0, "max_tokens": 5}}, {"responses_create_params": params})
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.max_tokens) == (0.5, -1, 9)
    assert spec.sampling.frequency_penalty == 0.0
    assert spec.instruction == "x"


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"instruction": "{{inputs}}"}, "$.instruction"),
        ({"runtime": {"prepare": [{"argv": ["echo", "{{rows.x}}"]}]}}, "$.runtime.prepare[0].argv[1]"),
        ({"num_samples": 2}, "$.num_samples"),
        ({"task_id": "t"}, "$.task_id"),
        ({"budgets": {"run_s": 0}}, "$.budgets.run_s"),
        ({"sampling": {"top_k": 5}}, "$.sampling.top_k"),
    ],
)
def test_invalid_template_is_refused_early(template: "dict[str, Json]", path: str) -> None:
    with pytest.raises(Refused) as refused:
        TaskTemplate(value=TASK | template)
    assert refused.value.path == path


def test_missing_field_or_row_is_refused() -> None:
    template = TaskTemplate(value=TASK | {"metadata": {"id": "{{row.meta.id}}"}})
    assert PLACEHOLDER.search("{{row.meta.id}}")
    with pytest.raises(Refused, match=r"the row has no meta.id"):
        template.task(read_run_request(run_body(meta={})))
    with pytest.raises(Refused, match="only /run has"):
        template.task(read_responses_request({"input": "x"}))


# ── what is answered ──────────────────────────────────────────────────────────


async def captured(desk: Desk) -> Trajectory:
    """A real session: a call of a tool, its result, a last word; and a sub-agent's turn beside them."""
    opened = await desk.open()

    def ask(*messages: Any) -> Any:
        body = {"model": "m", "messages": list(messages), "tools": [LOOK]}
        answer = post(
            f"{opened['base_urls']['openai']}/chat/completions",
            headers={"Authorization": f"Bearer {opened['key']}"},
            json=body,
            timeout=60,
        )
        return answer.raise_for_status().json()["choices"][0]["message"]

    hi = {"role": "user", "content": "What is in a.txt?"}
    call = await in_thread(ask, hi)
    await in_thread(
        ask, {"role": "system", "content": "You are another."}, {"role": "user", "content": "Else?"}
    )
    await in_thread(
        ask, hi, call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "hello"}
    )
    await desk.end(opened["session_id"], reward=0.25)
    found = await desk.journal.reader.query(queries.trajectory, opened["session_id"])
    assert found is not None
    return found


@pytest.fixture
async def found(tmp_path: Path) -> AsyncIterator[Trajectory]:
    engine = ScriptedEngine(
        reply=answers(CALLING, "Nothing.", "It says hello."), vocab_size=4096, context_length=CONTEXT
    )
    async with open_capture_node(tmp_path, engine) as desk:
        yield await captured(desk)


def verified(asked: GymRequest, trajectory: Trajectory) -> VerifyResponse:
    return VerifyResponse.model_validate(writing.verify_response(asked, trajectory))


async def test_answer_tokens_form_one_sequence(found: Trajectory) -> None:
    """The answer is Gym's, and its tokens are one sequence that the model saw."""
    answer = verified(read_run_request(run_body(expected="x")), found)
    assert (answer.reward, answer.mask_sample, answer.failure_kind) == (0.25, False, None)
    assert answer.model_extra is not None
    assert answer.model_extra["expected"] == "x"
    kinds = [item.type for item in answer.response.output]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    log = message_log(answer.response)
    row = writing.delivered(found)
    assert row is not None
    assert [len(ids) for role, ids in log if role == "assistant"] == [
        span.end - span.start for span in row.trained_spans
    ]
    assert [token for _, ids in log for token in ids] == row.tokens.tolist()
    logprobs = [value for item in answer.response.output for value in item.generation_log_probs or ()]
    assert logprobs == [-0.5] * row.trace.loss_mask.count(1)


async def test_call_and_result_share_id(found: Trajectory) -> None:
    output = GymResponse.model_validate(
        writing.response(read_responses_request({"input": "x"}).params, found)
    ).output
    call, result = output[1], output[2]
    assert isinstance(call, FunctionCall)
    assert isinstance(result, FunctionCallOutput)
    assert (call.name, call.call_id, result.output) == ("look", result.call_id, "hello")
    assert call.generation_token_ids is not None  # at the last item of the turn, and there alone
    assert output[0].generation_token_ids is None


async def test_largest_row_is_delivered_rest_counted(
    found: Trajectory,
) -> None:
    """Of several rows the one that trains most is delivered, and the rest is counted."""
    told: Any = writing.verify_response(read_run_request(run_body()), found)["polarnode"]
    assert told["rows"] == len(found.traces) == 2
    assert 0 < told["delivered_tokens"] < told["trainable_tokens"]
    assert told["weight_versions"] == ["0"]


OUTCOMES: "list[tuple[Outcome, float | None, bool, str | None]]" = [
    (Outcome(status="timeout", clock="run"), 0.0, False, "agent_timeout"),
    (Outcome(status="failed", exit_code=1), 1.0, False, "agent_run_error"),
    (Outcome(status="error", boundary="evaluator"), None, True, "verifier_error"),
    (Outcome(status="error", boundary="runtime"), None, True, "provider_unavailable"),
    (Outcome(status="error", boundary="laws"), None, True, "environment_server_failed"),
    (Outcome(status="interrupted", boundary="node"), None, True, "environment_server_failed"),
    (Outcome(status="cancelled"), None, True, "cancelled"),
]


@pytest.mark.parametrize(
    ("outcome", "reward", "masked", "kind"), OUTCOMES, ids=[kind or "" for *_, kind in OUTCOMES]
)
def test_failed_measurement_is_masked_and_named(
    outcome: Outcome, reward: float | None, masked: bool, kind: str | None
) -> None:
    answer = verified(
        read_run_request(run_body()), evolve(make_trajectory("s", reward=reward), outcome=outcome)
    )
    assert (answer.mask_sample, answer.failure_kind, answer.reward) == (masked, kind, reward or 0.0)
    assert masked_by_nemo_rl(answer.model_dump()) is masked


def test_mask_is_in_instance_config() -> None:
    """The mask is where NeMo RL reads it, beside what the row has there."""
    row = read_run_request(run_body(instance_config={"image": "x"}))
    answer = verified(row, make_trajectory("s", reward=None))
    assert answer.instance_config == {"image": "x", "mask_sample": True}


def test_reward_is_of_delivered_row() -> None:
    """An evaluator may give a lineage a reward of its own."""
    answer = verified(read_run_request(run_body()), one_row(reward=1.0, lineage_rewards={0: -0.5}))
    assert (answer.reward, answer.mask_sample) == (-0.5, False)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome(status="error", boundary="runtime", reason="no room"), "was lost to the machine: no room"),
        (Outcome(status="interrupted"), "was lost to the machine: without a reason"),
        (Outcome(status="cancelled", reason="by hand"), "was cancelled: by hand"),
        (Outcome(status="timeout", clock="run"), None),
        (Outcome(status="failed", exit_code=1), None),
        (Outcome(status="completed"), None),
    ],
)
def test_session_ended_otherwise_is_no_sample(outcome: Outcome, reason: str | None) -> None:
    """A session that its agent did not end is no sample."""
    assert writing.unusable(evolve(one_row(), outcome=outcome)) == reason


def test_session_without_sampled_token_is_rejected() -> None:
    """NeMo RL raises for one: "NeMo Gym returned a result with no generation data"."""
    assert "before a token was sampled" in str(writing.unusable(session_without_rows("failed")))


def test_silent_session_has_no_items() -> None:
    answer = verified(read_run_request(run_body()), evolve(make_trajectory("s"), turns=(), traces=()))
    assert (answer.response.output, message_log(answer.response)) == ([], [])


def test_collection_mean_excludes_masked_samples() -> None:
    samples: list[Any] = [
        {"_ng_task_index": 0, "reward": 1.0},
        {"_ng_task_index": 0, "reward": 0},
        {"_ng_task_index": 1, "reward": 1.0},
    ]
    told = AggregateMetrics.model_validate(
        writing.aggregated([*samples, {"_ng_task_index": 1, "reward": 0.0, "mask_sample": True}])
    )
    assert told.key_metrics == {"mean/reward": pytest.approx(2 / 3)}
    assert told.agent_metrics["masked_samples"] == 1
    assert [(each["_ng_task_index"], each["mean/reward"]) for each in told.group_level_metrics] == [
        (0, 0.5),
        (1, 1.0),
    ]
    assert writing.aggregated([]) == {
        "group_level_metrics": [],
        "agent_metrics": {"masked_samples": 0},
        "key_metrics": {},
    }


# ── rollouts, many at once ────────────────────────────────────────────────────


@define(eq=False)
class ScriptedNode:
    """A node's client by hand: tasks end when the test says so. The same rollouts run on a real one in
    test_nemo_gym_node.py.
    """

    tasks: "dict[str, bool]" = field(factory=dict)
    keys: "dict[str, str]" = field(factory=dict)
    cancelled: list[str] = field(factory=list)
    looks: int = 0
    fails: list[PolarnodeError] = field(factory=list)
    refuses: PolarnodeError | None = None
    channel: Any = field(factory=lambda: trio.open_memory_channel[Any](100))
    ends: list[Outcome] = field(factory=list)  # of the first sessions; the rest are completed

    async def submit(self, spec: Any, *, idempotency_key: str | None = None) -> Any:
        await trio.lowlevel.checkpoint()
        if self.refuses is not None:
            raise self.refuses
        task_id = self.keys.setdefault(idempotency_key or f"fresh-{len(self.tasks)}", f"t{len(self.tasks)}")
        self.tasks.setdefault(task_id, False)
        return SimpleNamespace(task_id=task_id)

    async def task_status(self, task_id: str) -> Any:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        if self.fails:
            raise self.fails.pop()
        return SimpleNamespace(
            finished=self.tasks[task_id], sessions=[SimpleNamespace(session_id=f"s-{task_id}")]
        )

    async def trajectory(
        self, session_id: str, *, turns: Any = "table", arrays: Any = "base64"
    ) -> Trajectory:
        await trio.lowlevel.checkpoint()
        assert turns == "full"
        found = make_trajectory(session_id)
        return evolve(found, outcome=self.ends.pop(0)) if self.ends else found

    async def cancel(self, task_id: str) -> bool:
        await trio.lowlevel.checkpoint()
        self.cancelled.append(task_id)
        return True

    async def status(self) -> "dict[str, Any]":
        await trio.lowlevel.checkpoint()
        return {"journal": {"last_seq": 7}}

    @asynccontextmanager
    async def trajectories(
        self, *, after: int | None = None, follow: bool | None = None, kinds: Any = ()
    ) -> AsyncIterator[Any]:
        assert (after, follow, kinds) == (7, True, ("task",))
        yield self.channel[1]

    def end(self, task_id: str, *, told: bool = True) -> None:
        self.tasks[task_id] = True
        if told:
            self.channel[0].send_nowait(SimpleNamespace(kind="task", data={"task_id": task_id}))


SPEC = filled({}, run_body())


@pytest.fixture
async def node() -> ScriptedNode:
    return ScriptedNode()


async def test_one_stream_wakes_all_rollouts(node: ScriptedNode, autojump_clock: Any) -> None:
    waiting, ended = Rollouts(node), dict[int, str]()

    async def run(number: int) -> None:
        ended[number] = (await waiting.run(SPEC, key=None)).session_id

    async with trio.open_nursery() as nursery:
        await nursery.start(waiting.follow)
        for number in range(20):
            nursery.start_soon(run, number)
        await trio.testing.wait_all_tasks_blocked()
        assert node.looks == 20
        for task_id in list(node.tasks):
            node.end(task_id)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert sorted(ended.values()) == sorted(f"s-t{number}" for number in range(20))
    assert (node.looks, node.cancelled, waiting._over) == (40, [], {})


async def test_end_missing_from_stream_is_polled(node: ScriptedNode, autojump_clock: Any) -> None:
    waiting = Rollouts(node)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run, waiting)
        await trio.sleep(1)
        node.end("t0", told=False)
    assert trio.current_time() >= app.LOOK_S


async def _run(waiting: Rollouts) -> None:
    assert (await waiting.run(SPEC, key=None)).session_id == "s-t0"


async def test_restarting_node_is_awaited(node: ScriptedNode, autojump_clock: Any) -> None:
    waiting = Rollouts(node)
    node.tasks["t0"] = True
    node.keys["fresh-0"] = "t0"
    node.fails = [Unreachable("gone")] * 3
    assert (await waiting.run(SPEC, key="fresh-0")).session_id == "s-t0"
    node.fails = [Unreachable("gone")] * 10_000
    with pytest.raises(Unreachable):
        await waiting.run(SPEC, key="fresh-0")
    assert trio.current_time() > app.PATIENCE_S


async def test_cancelled_unnamed_run_cancels_session(node: ScriptedNode, autojump_clock: Any) -> None:
    """Who leaves takes the session along, unless it has a name to come back by."""
    waiting = Rollouts(node)
    for key in (None, "nemo-gym:1-0"):
        with trio.move_on_after(1):
            await waiting.run(SPEC, key=key)
    assert node.cancelled == ["t0"]
    node.end("t1", told=False)
    assert (await waiting.run(SPEC, key="nemo-gym:1-0")).session_id == "s-t1"


# ── the routes ────────────────────────────────────────────────────────────────


@asynccontextmanager
async def serving(
    node: ScriptedNode, template: "dict[str, Json] | None" = None, lost: LostPolicy = "fail"
) -> AsyncIterator[Caller]:
    async with open_server(
        create_gym_app(Rollouts(node), TaskTemplate(value=TASK | (template or {})), lost=lost), ANYWHERE
    ) as address:
        yield Caller(url=f"http://{address.host}:{address.port}")


async def test_run_and_call_are_answered(node: ScriptedNode) -> None:
    node.tasks |= {"t0": True}
    node.keys |= {"nemo-gym:1-0": "t0"}
    async with serving(node) as caller:
        run = await caller.post("/run", run_body(_ng_rollout_id="1-0", extra=[1]))
        captured_path = await caller.post("/ng-rollout/1-0/v1/responses", {"input": "x"})
        assert (await caller.get("/")).status == 200
        metrics = await caller.post(
            "/aggregate_metrics", {"verify_responses": [{"reward": 1, "_ng_task_index": 0}]}
        )
    assert run.status == captured_path.status == metrics.status == 200
    answer = VerifyResponse.model_validate(run.json())
    assert answer.reward == 1.0
    assert run.json()["extra"] == [1]
    assert GymResponse.model_validate(captured_path.json()).output == answer.response.output
    AggregateMetrics.model_validate(metrics.json())


LOST = Outcome(status="error", boundary="runtime", reason="the container went")


async def test_lost_rollout_is_run_again(node: ScriptedNode) -> None:
    """A lost rollout is run again, and is no reward of zero."""
    ids = ("1-0", "1-0-r1", "1-0-r2")
    node.keys |= {f"nemo-gym:{name}": f"t{place}" for place, name in enumerate(ids)}
    node.tasks |= {f"t{place}": True for place in range(3)}
    node.ends = [LOST, LOST]
    async with serving(node) as caller:
        answer = await caller.post("/run", run_body(_ng_rollout_id="1-0"))
        assert (answer.status, answer.json()["polarnode"]["session_id"]) == (200, "s-t2")
        node.ends = [LOST] * 3
        gone = await caller.post("/run", run_body(_ng_rollout_id="1-0"))
    # which NeMo RL takes for infrastructure (`http_status_is_infra` of nemo_rl/experience/failures.py)
    assert gone.status == 503
    assert "3 sessions of this rollout cannot be trained" in gone.json()["detail"]


async def test_measuring_masks_lost_rollout(node: ScriptedNode) -> None:
    node.keys, node.tasks, node.ends = {"nemo-gym:1-0": "t0"}, {"t0": True}, [LOST]
    async with serving(node, lost="mask") as caller:
        answer = await caller.post("/run", run_body(_ng_rollout_id="1-0"))
    assert (answer.status, answer.json()["failure_kind"]) == (200, "provider_unavailable")


def test_differing_prompts_of_row_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """NeMo RL's groups are equal prompts: `calculate_baseline_and_std_per_prompt`, nemo_rl/algorithms/utils.py."""
    watch, other = PromptWatch(), session_of_two_rows()
    row = read_run_request(run_body(_ng_task_index=0, _rowidx=0))
    again = read_run_request(run_body(_ng_task_index=0, _rowidx=1))
    assert watch.same(row, one_row())
    assert watch.same(again, one_row(sample_index=1))
    assert not watch.same(again, other)
    assert "another prompt than the last rollout of the same row" in caplog.text
    assert watch.same(read_run_request(run_body(expected="another row")), other)


async def test_foreign_web_page_starts_no_rollout(node: ScriptedNode) -> None:
    async with serving(node) as caller:
        for headers, status in (
            ({"Origin": "http://evil.example"}, 403),
            ({"Host": "evil.example"}, 403),
            ({"Content-Type": "text/plain"}, 415),
        ):
            answer = await caller.post("/run", run_body(), **headers)
            assert (answer.status, list(answer.json())) == (status, ["detail"])
    assert node.tasks == {}


REFUSALS: "list[tuple[PolarnodeError, int]]" = [
    (ClientError("another body", status=409, type="conflict"), 409),
    (ClientError("no room", status=429, type="busy"), 429),
    (ClientError("no token", status=401, type="unauthorized"), 401),
    (ClientError("a bug", status=500, type="internal"), 503),
    (Unreachable("no answer"), 503),
]


@pytest.mark.parametrize(("error", "status"), REFUSALS, ids=[str(error) for error, _ in REFUSALS])
async def test_node_refusals_become_gym_errors(
    node: ScriptedNode, error: PolarnodeError, status: int
) -> None:
    node.refuses = error
    async with serving(node) as caller:
        answer = await caller.post("/run", run_body())
    assert (answer.status, answer.json()) == (status, {"detail": str(error)})


async def test_own_refusal_names_its_place(node: ScriptedNode) -> None:
    async with serving(node, {"metadata": {"id": "{{row.id}}"}}) as caller:
        for path, body in (
            ("/run", run_body()),
            ("/v1/responses", {"input": "x"}),
            ("/run", []),
            ("/aggregate_metrics", {}),
        ):
            answer = await caller.post(path, body)
            assert (answer.status, list(answer.json())) == (422, ["detail"]), answer.text
        assert (await caller.get("/nothing")).status == 404
    assert app.BODY_BYTES > 0
    assert node.tasks == {}
