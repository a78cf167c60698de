"""Judges over HTTP: what is asked, what is taken for an answer, what is asked again and when, and what a
session is told of the rest.
"""

import gzip
import logging
import os
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from fakes_engine import ScriptedEngine
from judge_kit import (
    CONTRACT,
    Endpoint,
    ScriptedJudge,
    asks,
    breaks_off,
    error,
    hangs_up,
    judged_by,
    never,
    says,
    sends,
    serving,
    slow,
)
from plane_kit import CONTEXT, answers, served, stage
from rewards_kit import finished, session
from tokens_kit import model
from trio.testing import MockClock

from polarnode.core import codec
from polarnode.core.errors import ConfigError, EvaluatorError
from polarnode.core.ports import Judge
from polarnode.evaluators import judging
from polarnode.evaluators.judging import JudgeConfig, read_rubric
from polarnode.node.config import NodeConfig
from polarnode.node.config_sources import read_config
from polarnode.node.opening import open_node
from polarnode.rollouts.judges import (
    ANSWER_BYTES,
    PAUSES,
    JudgeReply,
    TransientFailure,
    open_judges,
    read_reply,
    request_body,
)

IDLE = 0.2  # real seconds of nothing before virtual time jumps: packets on loopback take none


@pytest.fixture
def clock(mock_clock: MockClock) -> MockClock:
    """Virtual time that leaves real sockets a moment."""
    mock_clock.autojump_threshold = IDLE
    return mock_clock


# ── asked and answered ────────────────────────────────────────────────────────


async def test_question_sent_to_endpoint() -> None:
    async with judged_by(
        says("yes"),
        environment={"JUDGE_KEY": " sk-secret\n"},
        key_env="JUDGE_KEY",
        body={"reasoning_effort": "low", "temperature": None},
    ) as (
        judges,
        endpoint,
    ):
        assert await judges("j").ask(asks(schema={"type": "object"}, max_tokens=7)) == "yes"
    ((headers, body),) = endpoint.asked
    assert (headers[":path"], headers["authorization"], headers["accept-encoding"]) == (
        "/v1/chat/completions",
        "Bearer sk-secret",
        "identity",
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "how good was it?"}],
        "max_tokens": 7,
        "stream": False,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": {"type": "object"}},
        },
    }


@pytest.mark.parametrize(("structured", "format_"), [("object", {"type": "json_object"}), ("text", None)])
def test_response_format_follows_config(structured: Any, format_: Any) -> None:
    config = JudgeConfig(base_url="http://127.0.0.1/v1", model="m", structured=structured)
    body: Any = codec.read_json(request_body(config, asks(schema={"type": "object"})))
    assert body.get("response_format") == format_
    plain: Any = codec.read_json(request_body(JudgeConfig(base_url="http://127.0.0.1/v1", model="m"), asks()))
    assert "response_format" not in plain


@pytest.mark.parametrize("contract", CONTRACT, ids=lambda contract: contract.__name__)
async def test_http_judge_meets_contract(contract: Any) -> None:
    async with judged_by(says("yes")) as (judges, _):
        await contract(judges("j"))


@pytest.mark.parametrize("contract", CONTRACT, ids=lambda contract: contract.__name__)
async def test_memory_judge_meets_contract(contract: Any) -> None:
    await contract(ScriptedJudge(["yes"]))


async def test_own_chat_api_is_a_judge() -> None:
    """Our own model plane as the endpoint, over real sockets: the form is asked of its engine as a
    constraint, its answer is a reward.
    """
    written = '{"criteria":{"score":{"reason":"it works","score":9}}}'
    engine = ScriptedEngine(
        reply=answers(written), vocab_size=model().tokenizer.vocab_size, context_length=CONTEXT
    )
    seen = finished(session("I look", "fixed it"), {"judge": "j", "rubric": "Is it good?", "max_tokens": 200})
    async with served(stage(engine).app) as url:
        config = JudgeConfig(base_url=f"{url}/v1", model="tiny", key_env="K", attempts=1)
        async with open_judges({"j": config}, {"K": "key-s1"}) as judges:
            found = await judging.evaluate(evolve(seen, judge=judges))
        async with open_judges({"j": config}, {"K": "key-nobody"}) as judges:
            with pytest.raises(EvaluatorError, match="judge j refused the question: HTTP 401"):
                await judging.evaluate(evolve(seen, judge=judges))
    assert found.reward == 0.9
    (order,) = engine.orders
    assert (order.sampling.max_tokens, order.sampling.temperature) == (200, 0.0)
    assert order.constraint is not None
    assert codec.read_json(order.constraint.text.encode()) == read_rubric("Is it good?", []).schema()


# ── asked again ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fault",
    [
        error(500, "oops"),
        error(503, "later"),
        error(429, "slow down"),
        error(529, "overloaded"),
        hangs_up,
        breaks_off,
    ],
)
async def test_temporary_faults_are_retried(clock: MockClock, fault: Any) -> None:
    async with judged_by(fault, fault, says("yes")) as (judges, endpoint):
        began = trio.current_time()
        assert await judges("j").ask(asks()) == "yes"
        assert trio.current_time() - began >= 1.0 + 2.0, "one second, then two"
    assert len(endpoint.asked) == 3
    assert endpoint.asked[0][1] == endpoint.asked[2][1]


async def test_retry_waits_as_endpoint_asks(clock: MockClock) -> None:
    async with judged_by(error(429, "slow down", retry_after="17"), says("yes")) as (judges, _):
        began = trio.current_time()
        assert await judges("j").ask(asks()) == "yes"
        assert trio.current_time() - began >= 17


async def test_long_retry_after_is_not_awaited(clock: MockClock) -> None:
    async with judged_by(error(429, "quota spent", retry_after="3600")) as (judges, endpoint):
        with pytest.raises(
            EvaluatorError, match=r"judge j requests a pause of 3600 s: HTTP 429: quota spent"
        ):
            await judges("j").ask(asks())
    assert len(endpoint.asked) == 1


async def test_retries_are_limited(clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="polarnode.rollouts.judges")
    async with judged_by(error(500, "oops"), attempts=4) as (judges, endpoint):
        with pytest.raises(EvaluatorError, match="judge j gave no answer in 4 attempts: HTTP 500: oops"):
            await judges("j").ask(asks())
        found = judges.statistics()["j"]
    assert len(endpoint.asked) == 4
    assert (found.asked, found.again, found.failed, found.under_way) == (1, 3, 1, 0)
    assert len(caplog.records) == 3


async def test_timeout_is_retried(clock: MockClock) -> None:
    async with judged_by(never, says("yes"), answer_s=40.0) as (judges, _):
        began = trio.current_time()
        assert await judges("j").ask(asks()) == "yes"
        assert trio.current_time() - began >= 41
    async with judged_by(never, answer_s=40.0, attempts=1) as (judges, _):
        with pytest.raises(EvaluatorError, match="no answer in one attempt: no answer within 40 s"):
            await judges("j").ask(asks())


async def test_unreachable_endpoint_is_retried_and_named(clock: MockClock) -> None:
    config = JudgeConfig(base_url="http://127.0.0.1:9/v1", model="m", attempts=2)
    async with open_judges({"j": config}, {}) as judges:
        with pytest.raises(
            EvaluatorError, match="judge j gave no answer in 2 attempts: the connection failed"
        ):
            await judges("j").ask(asks())


def test_retry_after_date_is_parsed() -> None:
    now = time.time()
    reply = JudgeReply(status=503, headers={"retry-after": formatdate(now + 90, usegmt=True)}, body=b"")
    found = read_reply(reply, who="judge j", now=now)
    assert isinstance(found, TransientFailure)
    assert 88 < found.after_s <= 90
    for odd in ("soon", "", "-3", "Wed, 99 Foo"):
        assert read_reply(
            JudgeReply(status=503, headers={"retry-after": odd}), who="j", now=now
        ) == TransientFailure("HTTP 503")


# ── not asked again ───────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error(400, "no such model"), "judge j refused the question: HTTP 400: no such model"),
        (
            error(401, "Incorrect API key provided: sk-secret."),
            "refused the question: HTTP 401: Incorrect API key provided: ….",
        ),
        (error(404, "x" * 5000), "HTTP 404: xxx"),
        (sends(302, b"", location="http://elsewhere/"), "refused the question: HTTP 302"),
        (sends(403, b"<html>no</html>"), "HTTP 403: <html>no</html>"),
        (sends(200, b"{not json"), "answered with what is no chat completion: the body is not JSON"),
        (sends(200, b'{"choices": [{"text": "old"}]}'), "no chat completion: choices[0].message is missing"),
        (sends(200, b'{"choices": []}'), "answered without a choice"),
        (says(None, finish="content_filter"), r"answered without text (finish_reason content_filter)"),
        (says("half a", finish="length"), "was cut at its token limit: raise the evaluator's max_tokens"),
        (says(None, refusal="I can not judge that"), "would not answer: I can not judge that"),
        (sends(200, b" " * (ANSWER_BYTES + 1_000_000)), "answered with more than 4 MiB"),
        (sends(200, gzip.compress(b'{"choices": []}'), content_encoding="gzip"), "sent a compressed answer"),
    ],
)
async def test_permanent_error_is_raised_at_once(answer: Any, words: str) -> None:
    async with judged_by(answer, environment={"K": "sk-secret"}, key_env="K") as (judges, endpoint):
        with pytest.raises(EvaluatorError) as raised:
            await judges("j").ask(asks())
        assert await judges("j").ask_each([]) == []
    assert words in str(raised.value)
    assert len(str(raised.value)) < 500
    assert "sk-secret" not in str(raised.value)
    assert len(endpoint.asked) == 1


# ── the way there ─────────────────────────────────────────────────────────────


async def test_environment_proxy_skips_local_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy of the environment is for other machines than this one."""
    endpoint = Endpoint([says("by proxy")])
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(endpoint) as url:
        monkeypatch.setenv("HTTP_PROXY", url.removesuffix("/v1"))
        async with judged_by(says("straight")) as (judges, _):
            assert await judges("j").ask(asks()) == "straight"
        async with open_judges(
            {"far": JudgeConfig(base_url="http://judge.invalid/v1", model="m")}, {}
        ) as judges:
            assert await judges("far").ask(asks()) == "by proxy"
    ((headers, _),) = endpoint.asked
    assert headers[":path"] == "http://judge.invalid/v1/chat/completions"


# ── many at once ──────────────────────────────────────────────────────────────


async def test_concurrent_questions_are_limited(clock: MockClock) -> None:
    async with judged_by(slow(5, says("yes")), at_once=3) as (judges, endpoint):
        assert await judges("j").ask_each([asks(str(number)) for number in range(10)]) == ["yes"] * 10
    assert (endpoint.most, len(endpoint.asked)) == (3, 10)


async def test_failed_question_cancels_the_others(clock: MockClock) -> None:
    """A question that fails ends the others, and is raised without a group."""
    async with judged_by(slow(3, error(400, "no")), never) as (judges, endpoint):
        with pytest.raises(EvaluatorError, match="HTTP 400: no"):
            await judges("j").ask_each([asks(), asks(), asks()])
        assert judges.statistics()["j"].under_way == 0
    assert len(endpoint.asked) == 3


async def test_cancelled_question_frees_its_place(clock: MockClock) -> None:
    async with judged_by(never, says("yes"), at_once=1) as (judges, _):
        with trio.move_on_after(2):
            await judges("j").ask(asks())
        assert await judges("j").ask(asks()) == "yes"


# ── the node's own settings ───────────────────────────────────────────────────


async def test_unknown_judge_lists_known_names() -> None:
    async with judged_by(says("yes")) as (judges, _):
        with pytest.raises(EvaluatorError, match="no judge called 'k'; it has j"):
            judges("k")
        found: Judge = judges("j")
        assert found is judges("j")
    async with open_judges({}, {}) as none:
        assert none.names == frozenset()
        with pytest.raises(EvaluatorError, match="it has none"):
            none("j")


@pytest.mark.parametrize("environment", [{}, {"JUDGE_KEY": ""}, {"JUDGE_KEY": "  "}])
async def test_missing_key_names_its_variable(
    environment: dict[str, str],
) -> None:
    """A key that is missing stops the node with the variable's name."""
    config = JudgeConfig(base_url="http://127.0.0.1/v1", model="m", key_env="JUDGE_KEY")
    with pytest.raises(
        ConfigError, match=r"judges\.strict\.key_env names JUDGE_KEY, which is not in the node's environment"
    ):
        async with open_judges({"strict": config}, environment):
            raise AssertionError("opened")


async def test_node_without_judge_key_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = JudgeConfig(base_url="http://127.0.0.1/v1", model="m", key_env="JUDGE_KEY")
    said: list[str] = []
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        async with open_node(
            NodeConfig(state_dir=str(tmp_path), judges={"strict": judge}), report=said.append
        ):
            raise AssertionError("opened")
    assert said == []
    assert not any("sqlite" in name for name in os.listdir(tmp_path))


async def test_invalid_key_is_not_shown() -> None:
    """A key that no header takes is named without being shown."""
    config = JudgeConfig(base_url="http://127.0.0.1/v1", model="m", key_env="JUDGE_KEY")
    with pytest.raises(ConfigError) as raised:
        async with open_judges({"strict": config}, {"JUDGE_KEY": "schlüssel"}):
            raise AssertionError("opened")
    assert "JUDGE_KEY" in str(raised.value)
    assert "schlüssel" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"base_url": "127.0.0.1:9000/v1"}, "judges.j.base_url must be an http or https address"),
        ({"base_url": "http://[::1/v1"}, "judges.j.base_url"),
        ({"base_url": "http://user:key@127.0.0.1/v1"}, "must hold no key"),
        ({"model": ""}, "judges.j.model is empty"),
        ({"key_env": "sk-proj-abc"}, "must be a variable's name, never a key itself"),
        ({"at_once": 0}, "judges.j.at_once"),
        ({"answer_s": 0}, "judges.j.answer_s"),
        ({"attempts": 11}, "judges.j.attempts must be 1 to 10"),
        ({"structured": "yaml"}, "judges.j.structured"),
        ({"body": {"stream": True}}, "must leave messages, stream and n alone"),
        ({"timeout": 3}, "timeout"),
    ],
)
def test_invalid_judge_is_refused_by_setting(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(flags={"judges": {"j": {"base_url": "http://127.0.0.1/v1", "model": "m", **said}}})
    assert words in str(raised.value)
    with pytest.raises(ConfigError, match="needs a name"):
        read_config(flags={"judges": {"a b": {"base_url": "http://127.0.0.1/v1", "model": "m"}}})


def test_judges_are_read_from_settings() -> None:
    config = read_config(
        toml=(
            '[judges.strict]\nbase_url = "http://127.0.0.1:9000/v1"\nmodel = "judge"\nkey_env ='
            ' "JUDGE_KEY"\nat_once = 4'
        )
    )
    assert config.judges["strict"] == JudgeConfig(
        base_url="http://127.0.0.1:9000/v1", model="judge", key_env="JUDGE_KEY", at_once=4
    )


def test_pauses_fit_in_post_budget() -> None:
    assert 9 * PAUSES.longest_s <= 300
