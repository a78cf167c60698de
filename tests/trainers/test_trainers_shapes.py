"""The formats of trainers that no index has (slime, miles, prime-rl, NeMo RL), written down strictly; and
what each format refuses or stands in for.

The shapes are those that docs/trainers.md names, field by field and type by type, as their sources say them;
none is made from our code.
"""

from base64 import b64decode
from typing import Any, Literal

import msgspec
import numpy
import pytest
from attrs import evolve
from pydantic import BaseModel, ConfigDict, TypeAdapter
from trainers_kit import (
    group_of,
    make_turn,
    one_row,
    publish,
    session_of_two_rows,
    session_without_rows,
    taught,
)

from polarnode.core.errors import Refused
from polarnode.core.trajectory import Outcome, Trajectory
from polarnode.trainers import (
    Absent,
    areal,
    atropos,
    miles,
    nemo_rl,
    prime_rl,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from polarnode.trainers.rows import rows_of

SESSION = one_row()

# ── slime ─────────────────────────────────────────────────────────────────────


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class PrefixCache(Strict):
    cached_tokens: int
    total_prompt_tokens: int


class SlimeSample(Strict):
    group_index: int | None
    index: int | None
    rollout_id: int | None
    prompt: str | list[dict[str, str]]
    tokens: list[int]
    response: str
    response_length: int
    label: str | None
    reward: float | None
    loss_mask: list[int]
    weight_versions: list[str]
    rollout_log_probs: list[float]
    teacher_log_probs: list[float] | None
    rollout_routed_experts: list[list[list[int]]] | None
    remove_sample: bool
    status: Literal["pending", "completed", "truncated", "aborted", "failed"]
    metadata: dict[str, Any]
    session_id: str | None
    prefix_cache_info: PrefixCache


def held(sample: dict[str, Any]) -> None:
    """What slime (and miles' `validate`) ask of a Sample's lengths."""
    assert len(sample["tokens"]) >= sample["response_length"]
    assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
    if sample["teacher_log_probs"] is not None:
        assert len(sample["teacher_log_probs"]) == sample["response_length"]
    if sample["rollout_routed_experts"] is not None:
        assert len(sample["rollout_routed_experts"]) == len(sample["tokens"]) - 1


def test_slime_samples_of_sessions() -> None:
    [sample] = slime.samples(
        SESSION,
        group_index=3,
        index=12,
        rollout_id=5,
        prompt="do it",
        label="x",
        decode=lambda ids: "-".join(map(str, ids)),
    )
    SlimeSample.model_validate(sample)
    held(sample)
    assert (sample["group_index"], sample["index"], sample["rollout_id"], sample["label"]) == (3, 12, 5, "x")
    assert sample["response"] == "20-21-13-14-22-23-24"
    assert sample["weight_versions"] == ["7", "7", "8"]
    assert sample["prefix_cache_info"] == {"cached_tokens": 5, "total_prompt_tokens": 10}
    assert sample["metadata"]["polarnode"]["outcome"] == "completed"


STATUSES = [
    ("completed", "completed", "failed"), ("timeout", "truncated", "failed"), ("failed", "failed", "failed"), ("error", "failed", "failed"),
    ("cancelled", "aborted", "aborted"), ("interrupted", "aborted", "aborted"),
]  # fmt: skip


@pytest.mark.parametrize(("outcome", "with_rows", "without"), STATUSES)
def test_slime_status_of_outcome(outcome: Any, with_rows: str, without: str) -> None:
    [sample] = slime.samples(one_row(outcome=Outcome(status=outcome)))
    [nothing] = slime.samples(session_without_rows(outcome))
    SlimeSample.model_validate(nothing)
    held(nothing)
    assert (sample["status"], sample["remove_sample"]) == (with_rows, False)
    assert (nothing["status"], nothing["remove_sample"], nothing["reward"]) == (without, True, None)


def test_row_at_token_limit_is_truncated() -> None:
    [first] = SESSION.turns[:1]
    assert slime.samples(publish([evolve(first, finish_reason="length")]))[0]["status"] == "truncated"


def flat(groups: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [sample for session in groups for sample in session]


@pytest.mark.parametrize("module", [slime, miles])
def test_rollout_ids_are_shared_by_session(module: Any) -> None:
    """slime 624b824, `utils/dp_schedule.py`: a step holds `global_batch_size` different rollout ids.
    `ray/rollout.py`: mask sums are pooled over equal ids.
    """
    groups = [
        group_of(SESSION, session_of_two_rows(sample_index=1)),
        group_of(session_of_two_rows(), one_row(sample_index=1)),
    ]
    batch = [
        module.group_samples(group, group_index=place, index=2 * place) for place, group in enumerate(groups)
    ]
    assert [[each["rollout_id"] for each in flat(group)] for group in batch] == [[0, 1, 1], [2, 2, 3]]
    assert [[each["index"] for each in flat(group)] for group in batch] == [[0, 1, 1], [2, 2, 3]]
    assert [[each["group_index"] for each in flat(group)] for group in batch] == [[0, 0, 0], [1, 1, 1]]
    assert {each["rollout_id"] for each in module.samples(session_of_two_rows(), index=8)} == {8}


@pytest.mark.parametrize("module", [slime, miles])
def test_unusable_session_keeps_its_place(module: Any) -> None:
    """slime 624b824, `backends/megatron_utils/data.py`: a mask is padded by `prompt_length - 1`, so there is a
    prompt. `observability/rollout_data_utils.py`: experts of every sample, and none all zero.
    """
    scored = session_without_rows(sample_index=2)
    group = group_of(
        one_row(reward=1.0), one_row(sample_index=1, reward=0.0), lost=[evolve(scored, reward=0.0)]
    )
    [[first], [second], [lost], [missing]] = module.group_samples(group, group_index=4, index=10, size=4)
    assert [each["rollout_id"] for each in (first, second, lost, missing)] == [10, 11, 12, 13]
    for stand_in in (lost, missing):
        held(stand_in)
        assert (stand_in["remove_sample"], stand_in["reward"]) == (True, 0.5)
        assert (stand_in["tokens"], stand_in["loss_mask"]) == (first["tokens"][:2], [0])
        assert stand_in["rollout_routed_experts"] == first["rollout_routed_experts"][:1]
    # without a Group, a session without a reward is not usable either
    [[_], [unscored]] = module.group_samples([one_row(), one_row(reward=None)], group_index=0)
    assert (unscored["remove_sample"], unscored["reward"]) == (True, 1.0)


def test_sample_names_versions_and_reward() -> None:
    """A sample names the version of each stretch, and its session's reward."""
    own = slime.samples(SESSION)[0]["metadata"]["polarnode"]
    assert own["version_spans"] == [[0, 2, "7"], [4, 5, "7"], [5, 7, "8"]]
    assert (own["session_reward"], own["row_reward"], own["staleness"]) == (1.0, 1.0, None)


# ── miles ─────────────────────────────────────────────────────────────────────


def test_miles_samples_extend_slime_samples() -> None:
    """Miles' samples are slime's, but for its own names and types."""
    [ours], [theirs] = slime.samples(SESSION), miles.samples(SESSION)
    assert set(ours) - set(theirs) == {"session_id"}
    assert set(theirs) - set(ours) == {
        "rollout_indexer_topk",
        "opd_reverse_kl",
        "adapter",
        "reward_spec",
        "routing_key",
    }
    [native] = miles.samples(SESSION, arrays="native")
    experts = native["rollout_routed_experts"]
    assert (str(experts.dtype), experts.shape) == ("int32", (9, 2, 3))
    assert isinstance(native["tokens"], list)
    assert native["routing_key"] == "s0"
    [sent] = miles.session_tensors(SESSION, arrays="native")
    types = {
        "tokens": "int64",
        "loss_mask": "uint8",
        "rollout_log_probs": "float64",
        "rollout_routed_experts": "int32",
    }
    assert {name: str(each.dtype) for name, each in sent["tensors"].items()} == types
    assert miles.session_tensors(session_without_rows()) == []


def test_miles_session_tensors_are_complete() -> None:
    """radixark/miles 31f1ca9, `miles/rollout/session/samples/codec.py`, SAMPLES_VALUE_SPEC_V2: the fields of
    codec json, each of which `decode_samples_and_merge_input_sample` reads by its name.
    """
    json_fields = {"response", "response_length", "status", "weight_versions", "prefix_cache_info"}
    [sent] = miles.session_tensors(SESSION, decode=lambda ids: "-".join(map(str, ids)))
    assert set(sent["metadata"]) == json_fields | {"metadata", "reward"}
    assert sent["metadata"]["response"] == "20-21-13-14-22-23-24"


def test_miles_rows_share_session_reward() -> None:
    """radixark/miles 31f1ca9, `ray/rollout/train_data_conversion.py`: `all samples in rollout … must share one
    reward`.
    """
    session = session_of_two_rows(reward=1.0, lineage_rewards={1: -2.0})
    assert [each["reward"] for each in slime.samples(session)] == [1.0, -2.0]
    assert [each["reward"] for each in miles.samples(session)] == [1.0, 1.0]
    assert [each["metadata"]["polarnode"]["row_reward"] for each in miles.samples(session)] == [1.0, -2.0]


@pytest.mark.parametrize("module", [slime, miles])
def test_teacher_logprobs_need_every_sample(module: Any) -> None:
    """slime 624b824, `ray/rollout.py`: `if samples[0].teacher_log_probs is not None`, then those of all;
    `backends/megatron_utils/loss.py`, `apply_opd_kl_to_advantages`: subtracted from the response's logprobs.
    miles 31f1ca9: `utils/types.py` compares their length with the response's.
    """
    group = group_of(
        taught(one_row()),
        taught(session_of_two_rows(sample_index=1)),
        lost=[evolve(session_without_rows(sample_index=2), reward=0.0)],
    )
    found = flat(module.group_samples(group, group_index=0, size=4))
    assert found[0]["teacher_log_probs"] == [-0.25, -0.375, 0, 0, -1.25, -1.375, -1.5]
    assert [each["teacher_log_probs"] for each in found[1:]] == [[-0.25, -0.375], [-1.25], [0], [0]]
    for each in found:
        held(each)
    assert [each["teacher_log_probs"] for each in module.samples(session_of_two_rows())] == [None, None]
    mixed = group_of(taught(one_row()), one_row(sample_index=1))
    with pytest.raises(Refused, match="session s1 has no teacher's logprobs"):
        module.group_samples(mixed, group_index=0)


# ── teachers elsewhere ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "projected",
    [
        lambda both: areal.rollout(both),
        lambda both: atropos.scored_data(both),
        lambda both: verl.data_proto(both, pad_token_id=0),
        lambda both: trl.distillation_samples(both[0], teacher_id="big", prompt_id=0),
        lambda both: tinker.datums(both[0], kl_penalty_coef=1.0),
    ],
)
def test_session_without_teacher_logprobs_is_refused(projected: Any) -> None:
    with pytest.raises(Refused, match="session s0 has no teacher's logprobs"):
        projected([one_row(), taught(one_row(sample_index=1))])


def test_verl_refuses_row_without_teacher() -> None:
    """verl 0.9.1, `_postprocess` (experimental/agent_loop/agent_loop.py) reads the first row's of all rows."""
    known, unknown = taught(session_of_two_rows()).traces[0], session_of_two_rows().traces[1]
    half = evolve(session_of_two_rows(), traces=(known, unknown))
    for project in (verl.agent_loop_outputs, lambda one: verl.transfer_rows(one, uid="u", global_steps=0)):
        with pytest.raises(Refused, match="row 1 of session s0 has no teacher's logprobs"):
            project(half)


def test_prime_rl_omits_unscored_samples() -> None:
    """PrimeIntellect-ai/prime-rl 559b44772: `ref_logprobs` of a sample has its length (trainer/batch.py), and
    `assign_reference_logprobs` (orchestrator/algo/routing.py) scores the nodes that have None.
    """
    [known], [unknown] = prime_rl.training_samples(taught(SESSION)), prime_rl.training_samples(SESSION)
    assert known["ref_logprobs"] == [0, 0, 0, -0.25, -0.375, 0, 0, -1.25, -1.375, -1.5]
    assert unknown["ref_logprobs"] is None
    found = [node.get("reference_logprobs") for node in prime_rl.trace_nodes(taught(SESSION))]
    assert found == [None, [-0.25, -0.375], None, [-1.25, -1.375, -1.5]]


# ── prime-rl ──────────────────────────────────────────────────────────────────


class EncodedTensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


class RoutedExperts(msgspec.Struct, array_like=True, omit_defaults=True):
    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct, array_like=True, omit_defaults=True):
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: dict[str, EncodedTensor] | None = None
    routed_experts: RoutedExperts | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


@pytest.mark.parametrize("advantage", [None, 0.5])
@pytest.mark.parametrize("session", [SESSION, session_of_two_rows()])
def test_prime_rl_builds_sample_struct(session: Trajectory, advantage: float | None) -> None:
    """Converted by msgspec, strictly, into a struct of the same fields in the same order: what `prepare_batch`
    takes in prime-rl's environment (PrimeIntellect-ai/prime-rl 559b44772, transports/rollouts/types.py).
    """
    for sample in prime_rl.training_samples(session, env_name="swe", advantage=advantage):
        found = msgspec.convert(prime_rl.values(sample), TrainingSample)
        assert found.env_name == "swe"
        length = len(found.token_ids)
        assert len(found.mask) == len(found.logprobs) == len(found.temperatures) == length
        assert found.advantages is None if advantage is None else len(found.advantages or ()) == length
        if found.routed_experts is not None:
            assert (found.routed_experts.shape, found.routed_experts.dtype) == ([length, 2, 3], "uint8")
            # of the last token, from which nothing was computed
            assert found.routed_experts.data[-6:] == bytes(6)


def test_prime_rl_fields_follow_struct_order() -> None:
    """Those that we have nothing for are a user's to fill: each has its place."""
    [sample] = prime_rl.training_samples(one_row(), advantage=0.5)
    filled = sample | {
        name: [float(place)]
        for place, name in enumerate(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"))
    }
    found = msgspec.convert(prime_rl.values(filled | {"mm_token_type_ids": [9]}), TrainingSample)
    assert [found.ref_logprobs, found.rl_weights, found.ce_weights, found.ref_kl_weights] == [
        [0.0],
        [1.0],
        [2.0],
        [3.0],
    ]
    assert (found.mm_token_type_ids, found.mm_kwargs) == ([9], None)


# ── NeMo RL ───────────────────────────────────────────────────────────────────


def test_nemo_rl_trains_only_assistant_text() -> None:
    import torch

    [result] = nemo_rl.results(SESSION, decode=lambda ids: f"{len(ids)} tokens", arrays="native")
    log = result["message_log"]
    assert [(each["role"], each["token_ids"].tolist(), each["content"]) for each in log] == [
        ("user", [10, 11, 12], "3 tokens"), ("assistant", [20, 21], "2 tokens"), ("user", [13, 14], "2 tokens"), ("assistant", [22, 23, 24], "3 tokens"),
    ]  # fmt: skip
    assert ["generation_logprobs" in each for each in log] == [False, True, False, True]
    assert log[1]["generation_logprobs"].dtype == torch.float32
    assert torch.cat([each["routed_experts"] for each in log])[:, 0, 0].tolist() == [*range(9), 0]
    assert [each["token_ids"].tolist() for each in result["input_message_log"]] == [[10, 11, 12]]
    assert result["full_result"]["reward"] == 1.0
    # `torch.tensor` of NeMo RL's own rollouts; its batches refuse two dtypes
    assert {each["token_ids"].dtype for each in log} == {torch.int64}
    assert {each["routed_experts"].dtype for each in log} == {torch.int16}
    first, second = nemo_rl.gym_items(SESSION)[0]
    assert first["prompt_token_ids"] + first["generation_token_ids"] == second["prompt_token_ids"][:5]


def test_gym_items_have_all_expert_rows() -> None:
    """`_postprocess_nemo_gym_to_nemo_rl_result` (NVIDIA-NeMo/RL, nemo_rl/environments/nemo_gym.py at 7ea279a)
    raises for fewer: "too few routed_experts rows". Its codec is nemo_rl/utils/routed_experts_codec.py.
    """
    first, second = nemo_rl.gym_items(SESSION)[0]
    for item in (first, second):
        expected = len(item["prompt_token_ids"]) + len(item["generation_token_ids"])
        assert len(item["routed_experts"]) == expected
    assert [row[0][0] for row in first["routed_experts"]] == [0, 1, 2, 3, 4]
    assert [row[0][0] for row in second["routed_experts"]] == [*range(9), 0]  # the last token had none
    coded = nemo_rl.gym_items(SESSION, arrays="native")[0][1]
    magic, dtype, shape, data = coded["routed_experts"].split(":")
    assert (magic, dtype, shape) == ("nrlre1", "int16", "10x2x3")
    values = numpy.frombuffer(b64decode(data), dtype="<i2").reshape(10, 2, 3)
    assert values.tolist() == second["routed_experts"]
    assert coded["prompt_token_ids"] == second["prompt_token_ids"]


def test_consecutive_samples_are_one_item() -> None:
    """`torch.tensor([])` is float32: a prompt that adds nothing ends NeMo RL's batch with "expected consistent
    types" (`_validate_tensor_consistency` of nemo_rl/data/llm_message_utils.py at 7ea279a).
    """
    first = make_turn(0, None, [1, 2], [3, 4])
    found = publish([first, make_turn(1, first, [], [5, 6]), make_turn(2, None, [7], [8], lineage=1)])
    [item], [_] = nemo_rl.gym_items(found)
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert len(item["generation_log_probs"]) == 4


# ── what can not be said ──────────────────────────────────────────────────────


def test_missing_reward_is_refused() -> None:
    unjudged = one_row(reward=None)
    for refuses in (
        lambda: areal.tensors(unjudged),
        lambda: atropos.scored_data([unjudged]),
        lambda: skyrl.generator_output([unjudged]),
    ):
        with pytest.raises(Refused, match="has no reward"):
            refuses()
    assert trl.rollout_output([unjudged])["reward"] == [None]
    assert slime.samples(unjudged)[0]["reward"] is None
    assert "reward_score" not in verl.agent_loop_outputs(unjudged)[0]
    assert "rm_scores" not in verl.transfer_rows(unjudged, uid="u", global_steps=0)[0]["fields"]


def named(version: str) -> Trajectory:
    """A session that weights of this name sampled."""
    turns = [
        evolve(turn, version_spans=tuple(evolve(span, version=version) for span in turn.version_spans))
        for turn in SESSION.turns
    ]
    return publish(turns)


def test_named_versions_need_a_number() -> None:
    for refuses in (areal.tensors, lambda one: trl.rollout_samples(one, advantage=1.0, group_id=0)):
        with pytest.raises(Refused, match="'step-12' is no whole number"):
            refuses(named("step-12"))
    [row] = areal.tensors(named("step-12"), number=lambda version: int(version.removeprefix("step-")))
    assert set(row["versions"][0]) == {-1, 12}
    [output] = verl.agent_loop_outputs(named("step-12"))
    assert "min_global_steps" not in output["extra_fields"]
    assert output["extra_fields"]["polarnode"]["weight_versions"] == ["step-12"]
    with pytest.raises(Refused, match="'step-12' is no whole number"):
        verl.transfer_rows(named("step-12"), uid="u", global_steps=1)
    [counted] = verl.agent_loop_outputs(named("step-12"), number=lambda version: 12)
    assert counted["extra_fields"]["max_global_steps"] == 12


def test_trained_first_token_cannot_be_shifted() -> None:
    """A first token that is trained has no place in a shifted row."""
    [trace] = SESSION.traces
    bare = evolve(
        trace,
        token_ids=trace.token_ids[3:],
        loss_mask=trace.loss_mask[3:],
        logprobs=trace.logprobs[3:],
        prompt_length=0,
    )
    with pytest.raises(Refused, match="the first token of row 0 of session s0 is trained"):
        tinker.datums(evolve(SESSION, traces=(bare,)))


def test_supervised_datums_weight_trained_tokens() -> None:
    [row] = tinker.supervised_datums(SESSION)
    assert row["loss_fn_inputs"]["weights"] == {
        "data": [0, 0, 1, 1, 0, 0, 1, 1, 1],
        "dtype": "float32",
        "shape": [9],
    }
    assert set(row["loss_fn_inputs"]) == {"target_tokens", "weights"}


def test_empty_session_projects_to_nothing() -> None:
    empty = session_without_rows()
    assert areal.rollout([empty]) is None
    assert (
        verl.agent_loop_outputs(empty)
        == tinker.datums(empty)
        == nemo_rl.results(empty)
        == prime_rl.training_samples(empty)
        == []
    )
    for refuses in (
        lambda: atropos.scored_data([empty]), lambda: verl.data_proto([empty], pad_token_id=0), lambda: skyrl.generator_output([]),
        lambda: trl.rollout_output([]), lambda: skyrl.generator_output([empty]), lambda: trl.rollout_output([empty]),
        lambda: skyrl.generator_output([empty], absent=Absent(token_id=1)),
    ):  # fmt: skip
        with pytest.raises(Refused):
            refuses()


def test_areal_rollout_rows_are_padded() -> None:
    batch: Any = areal.rollout([SESSION, session_of_two_rows(sample_index=1)])
    assert batch["input_ids"][2] == [30, 31, 32, 40, 0, 0, 0, 0, 0, 0]
    assert batch["versions"][2] == [-1, -1, -1, 8, -1, -1, -1, -1, -1, -1]
    assert batch["attention_mask"][1] == [True] * 4 + [False] * 6
    assert [len(each) for each in batch["logprobs"]] == [10, 10, 10]
    assert batch["rewards"] == batch["original_rewards"] == [1.0, 1.0, 1.0]
    # the turn of each trained token, which `gae_timestep_unit: turn` needs
    assert batch["turn_ids"][0] == [-1, -1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert batch["turn_ids"][2] == [-1, -1, -1, 0, -1, -1, -1, -1, -1, -1]


def test_areal_rewards_are_compared_by_session() -> None:
    """Rewards 1, 0 and 0 of sessions with 2 rows, 1 and 1: over rows their mean would be 1/2."""
    group = group_of(
        session_of_two_rows(), one_row(sample_index=1, reward=0.0), one_row(sample_index=2, reward=0.0)
    )
    batch: Any = areal.rollout(group, estimator="grpo_without_std")
    assert batch["rewards"] == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])
    assert batch["original_rewards"] == [1.0, 1.0, 0.0, 0.0]
    apart = group_of(session_of_two_rows(lineage_rewards={1: 0.5}), one_row(sample_index=1, reward=0.0))
    batch = areal.rollout(apart, estimator="grpo_without_std")
    assert batch["rewards"] == [0.5, 0.0, -0.5]  # the second lineage's own reward against the same baseline
    assert batch["original_rewards"] == [1.0, 0.5, 0.0]
    with pytest.raises(Refused, match="compares the sessions of a Group"):
        areal.rollout([SESSION], estimator="grpo")


def test_stand_in_is_never_trained() -> None:
    said = trl.rollout_output([SESSION, session_without_rows(sample_index=1)], absent=Absent(token_id=9))
    assert (said["completion_ids"][1], said["env_mask"][1], said["reward"]) == ([9], [0], [1.0, None])
    output = skyrl.generator_output(
        [SESSION, session_without_rows(sample_index=1)], absent=Absent(token_id=9, reward=-1.0)
    )
    assert (output["response_ids"][1], output["loss_masks"][1], output["rewards"]) == ([9], [0], [1.0, -1.0])
    assert [len(each) for each in output["rollout_expert_indices"]] == [10, 2]
    assert output["is_last_step"] == [True, True]


def test_group_rollout_keeps_every_member() -> None:
    """One row, none, and two of which the main agent's is kept, with its own reward."""
    two = session_of_two_rows(sample_index=2, lineage_rewards={1: 0.25}, reward=0.5)
    lost = session_without_rows(sample_index=1)
    group = group_of(SESSION, two, lost=[lost])
    output = trl.rollout_members(group, absent=Absent(token_id=9))
    assert output["reward"] == [1.0, 0.25, None]
    assert output["completion_ids"][1:] == [[40], [9]]
    assert output["env_mask"][1:] == [[1], [0]]
    assert (output["rows_left_out"], output["unusable"]) == ([0, 1, 0], [0, 0, 1])
    assert output["session_id"] == ["s0", "s2", "s1"]
    first, second = two.traces
    beside = evolve(two, traces=(first, evolve(second, role="subagent")))
    kept = trl.rollout_members(group_of(beside), absent=Absent(token_id=9))
    assert (kept["completion_ids"], kept["reward"]) == ([[20, 21]], [0.5])
    with pytest.raises(Refused, match="has 2 rows"):
        trl.rollout_members(group_of(beside), absent=Absent(token_id=9), several="refuse")
    dropped = trl.rollout_members(evolve(group_of(SESSION), state="dropped"), absent=Absent(token_id=9))
    assert (dropped["reward"], dropped["env_mask"]) == ([None], [[0]])


def test_rows_may_have_own_advantages() -> None:
    samples = trl.rollout_samples(session_of_two_rows(), advantage=[0.5, -0.5], group_id=1)
    assert [each["advantage"] for each in samples] == [0.5, -0.5]
    with pytest.raises(Refused, match="1 advantages were given for the 2 rows"):
        trl.rollout_samples(session_of_two_rows(), advantage=[0.5], group_id=1)


def test_skyrl_refuses_partial_experts() -> None:
    with pytest.raises(Refused, match="pass experts=False"):
        skyrl.generator_output([SESSION, session_of_two_rows(sample_index=1)])
    output = skyrl.generator_output([SESSION, session_of_two_rows(sample_index=1)], experts=False)
    assert (output["is_last_step"], output["rollout_expert_indices"]) == ([True, False, True], None)
    assert output["trajectory_generation_times"] == [9.0, 9.0, 9.0]


def test_skyrl_rows_have_session_reward() -> None:
    """It gives all rows of a session the last one's reward, and finds the prompt by its own id."""
    apart = session_of_two_rows(reward=0.5, lineage_rewards={1: 0.0})
    output = skyrl.generator_output([apart], trajectory_ids=[("17", 3)])
    assert output["rewards"] == [0.5, 0.5]
    assert output["trajectory_ids"] == [{"instance_id": "17", "repetition_id": 3}] * 2
    with pytest.raises(Refused, match="2 trajectory_ids for 1 sessions"):
        skyrl.generator_output([apart], trajectory_ids=[("17", 3), ("17", 4)])


def test_skyrl_has_row_per_member() -> None:
    """A batch with fewer rows than prompts ends SkyRL's step."""
    group = group_of(
        SESSION, one_row(sample_index=2, reward=0.0), lost=[session_without_rows(sample_index=1)]
    )
    output = skyrl.generator_output(group, absent=Absent(token_id=9))
    assert [each["repetition_id"] for each in output["trajectory_ids"]] == [0, 2, 1]
    assert output["rewards"] == [1.0, 0.0, 0.5]  # of the lost one, what leaves the mean where it is
    assert [sum(mask) for mask in output["loss_masks"]] == [5, 5, 0]
    assert skyrl.generator_output(group, absent=Absent(token_id=9, reward=-1.0))["rewards"][2] == -1.0
    assert len(skyrl.generator_output(group, step_wise=True)["rewards"]) == 2
    with pytest.raises(Refused, match="session s1 is not usable"):
        skyrl.generator_output(group)


def test_atropos_needs_all_advantages_or_none() -> None:
    with pytest.raises(Refused, match="no advantage is given for session s0"):
        atropos.scored_data([SESSION], advantages={"s1": 1.0})
    assert atropos.scored_data([SESSION], generation_params={"temperature": 1.0})["generation_params"] == {
        "temperature": 1.0
    }


# ── verl's batches ────────────────────────────────────────────────────────────


def test_data_proto_is_padded_like_verl() -> None:
    made = verl.data_proto(
        [SESSION, session_of_two_rows(sample_index=1)], pad_token_id=999, prompt_length=4, response_length=8
    )
    batch, beside = made["batch"], made["non_tensor_batch"]
    TypeAdapter(dict[str, list[Any]]).validate_python(batch)
    assert batch["prompts"] == [[999, 10, 11, 12], [999, 999, 10, 11], [999, 30, 31, 32]]
    assert batch["responses"][1] == [20, 21, 999, 999, 999, 999, 999, 999]
    assert batch["attention_mask"][1] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    # verl's clip of a running sum, which padding does not raise
    assert batch["position_ids"][1] == [0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert batch["response_mask"][0] == [1, 1, 0, 0, 1, 1, 1, 0]
    assert [each.index(1.0) for each in batch["rm_scores"]] == [6, 1, 0]
    assert "routed_experts" not in batch  # which not every row carries
    assert (beside["uid"], beside["index"], beside["__num_turns__"]) == (
        ["g", "g", "g"],
        [0, 1, 1],
        [4, 2, 2],
    )
    whole = verl.data_proto([SESSION], pad_token_id=999, prompt_length=4, arrays="native")["batch"]
    assert whole["routed_experts"][0, :, 0, 0].tolist() == [0, *range(9), 0]
    assert str(whole["routed_experts"].dtype) == "torch.int16"
    with pytest.raises(Refused, match="a response of 7 tokens does not fit response_length 6"):
        verl.data_proto([SESSION], pad_token_id=999, response_length=6)


def test_queue_prompt_reports_usable_sessions() -> None:
    kept, lost = (
        group_of(SESSION, session_of_two_rows(sample_index=1)),
        group_of(SESSION, lost=[session_without_rows(sample_index=1)]),
    )
    made = verl.transfer_group(kept, uid="u", global_steps=4)
    assert (made["key"], made["tag"]) == ("u", {"is_prompt": True, "status": "finished", "global_steps": 4})
    assert [row["key"] for row in made["rows"]] == ["u_0_0", "u_1_0", "u_1_1"]
    assert verl.transfer_group(lost, uid="u", global_steps=4)["tag"]["status"] == "failure"
    assert verl.transfer_group([session_without_rows()], uid="u", global_steps=4) == {
        "key": "u",
        "tag": {"is_prompt": True, "status": "failure", "global_steps": 4},
        "rows": [],
    }


def test_sessions_of_several_tasks_have_keys() -> None:
    """As verl's own agent loop makes them: a task for each sample, whose only session has index 0."""
    made = verl.transfer_group(
        [one_row(), session_of_two_rows(), one_row()], uid="u", global_steps=4, prompt={"index": 3}
    )
    assert [row["key"] for row in made["rows"]] == ["u_0_0", "u_1_0", "u_1_1", "u_2_0"]
    assert [row["fields"]["session_id"] for row in made["rows"]] == [0, 1, 1, 2]
    assert {(row["fields"]["uid"], row["fields"]["index"]) for row in made["rows"]} == {("u", 3)}


def test_session_rows_share_reward_and_fields() -> None:
    """V1 reads the last row's reward for the session, and the first row's fields for all its rows."""
    apart = session_of_two_rows(reward=0.5, lineage_rewards={1: 5.0})
    first, second = apart.traces
    partly = evolve(apart, traces=(evolve(first, routed=SESSION.traces[0].routed), second))
    for rows in (
        verl.agent_loop_outputs(partly),
        [row["fields"] for row in verl.transfer_rows(partly, uid="u", global_steps=1)],
    ):
        assert set(rows[0]) == set(rows[1])
        assert [row["extra_fields"]["polarnode"]["lineage_reward"] for row in rows][1] == 5.0
    assert [row["reward_score"] for row in verl.agent_loop_outputs(partly)] == [0.5, 0.5]


# ── truncation ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clock", ["turns", "tokens", "run", "repeats"])
def test_budget_truncates_in_every_format(clock: Any) -> None:
    """Though the session's last answer was whole, so that its last token ends it."""
    session = one_row(outcome=Outcome(status="timeout", clock=clock))
    assert session.traces[0].finish_reason == "stop"
    assert said_truncated(session) == [True] * 9
    assert said_truncated(one_row()) == [False] * 9


def test_cut_answer_truncates_every_format() -> None:
    first = make_turn(0, None, [10, 11, 12], [20, 21])
    cut = publish([first, make_turn(1, first, [13], [22, 23], finish_reason="length")])
    assert cut.outcome.status == "completed"
    assert said_truncated(cut) == [True] * 9
    failed = evolve(cut, outcome=Outcome(status="failed"))
    assert slime.samples(failed)[0]["status"] == "truncated"


def said_truncated(session: Trajectory) -> list[bool]:
    """What each format says of a session of one row."""
    output = trl.rollout_output([session])
    marked = atropos.scored_data([session], mask_truncated=True)["overrides"]
    return [
        # TRL 1.16: `ids[-1] not in eos_and_pad`, of which the last token of the first answer is one
        output["completion_ids"][0][-1] not in {session.traces[0].token_ids[4], 24},
        slime.samples(session)[0]["status"] == "truncated",
        miles.samples(session)[0]["status"] == "truncated",
        skyrl.generator_output([session])["stop_reasons"] == ["length"],
        verl.agent_loop_outputs(session)[0]["extra_fields"]["polarnode"]["truncated"],
        areal.tensors(session)[0]["truncated"] == [True],
        nemo_rl.results(session)[0]["full_result"]["truncated"],
        marked == [{"set_advantage_to_zero": True}],
        rows_of(session)[0].truncated,
    ]


def test_completion_ends_as_trl_expects() -> None:
    """With the trainer's own ids of tokens that end: a whole session has one last, a truncated one none. What is
    added is not trained.
    """
    whole, over = one_row(), one_row(outcome=Outcome(status="timeout", clock="run"))
    ids = trl.rollout_output([whole])["completion_ids"][0]
    assert trl.rollout_output([whole], ends=(24,))["completion_ids"] == [ids]
    assert trl.rollout_output([over], ends=(99,))["completion_ids"] == [ids]
    for session, ends, ended in ((whole, (99, 98), True), (over, (24, 99), False)):
        output = trl.rollout_output([session], ends=ends)
        [found], [mask], [logprobs] = output["completion_ids"], output["env_mask"], output["logprobs"]
        assert (found[:-1], found[-1] in ends, mask[-1], logprobs[-1]) == (ids, ended, 0, 0.0)
        assert len(mask) == len(logprobs) == len(found)
        group = trl.rollout_members(group_of(session), absent=Absent(token_id=0), ends=ends)
        assert group["completion_ids"] == [found]
