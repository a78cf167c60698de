"""Whatever a session was, each format says every trained token again: its id, its logprob to the bit, its
version where it has one, in its place.

Each reader below knows its trainer's conventions and nothing of ours: what it trains on is what a
trajectory's masks say.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from sample_kit import examples
from trainers_kit import published, taught, trained, trees

from polarnode.core.trajectory import Trajectory
from polarnode.trainers import areal, atropos, miles, nemo_rl, prime_rl, skyrl, slime, tinker, trl, verl

Told = list[tuple[int, float]]
Reader = Callable[[Trajectory], Iterator[Told]]


def masked(ids: list[int], mask: list[int], logprobs: list[float]) -> Told:
    """What a loss sees: three arrays of one length."""
    assert len(ids) == len(mask) == len(logprobs)
    assert all(logprob == 0 for logprob, one in zip(logprobs, mask, strict=True) if not one)
    return [(token, logprob) for token, one, logprob in zip(ids, mask, logprobs, strict=True) if one]


def read_verl(trajectory: Trajectory) -> Iterator[Told]:
    for row in verl.agent_loop_outputs(trajectory):
        yield masked(row["response_ids"], row["response_mask"], row["response_logprobs"])


def read_verl_queue(trajectory: Trajectory) -> Iterator[Told]:
    for each in verl.transfer_rows(trajectory, uid="u", global_steps=1):
        row = each["fields"]
        assert row["input_ids"] == row["prompts"] + row["responses"]
        assert row["position_ids"] == list(range(len(row["input_ids"])))
        yield masked(row["responses"], row["loss_mask"], row["rollout_log_probs"])


def read_verl_batch(trajectory: Trajectory) -> Iterator[Told]:
    batch = verl.data_proto([trajectory], pad_token_id=999)["batch"]
    for place, responses in enumerate(batch["responses"]):
        assert batch["input_ids"][place] == batch["prompts"][place] + responses
        yield masked(responses, batch["response_mask"][place], batch["rollout_log_probs"][place])


def read_slime(trajectory: Trajectory) -> Iterator[Told]:
    for sample in slime.samples(trajectory):
        yield masked(
            sample["tokens"][-sample["response_length"] :], sample["loss_mask"], sample["rollout_log_probs"]
        )


def read_miles(trajectory: Trajectory) -> Iterator[Told]:
    for sample in miles.samples(trajectory):
        yield masked(
            sample["tokens"][-sample["response_length"] :], sample["loss_mask"], sample["rollout_log_probs"]
        )


def read_miles_session(trajectory: Trajectory) -> Iterator[Told]:
    for each in miles.session_tensors(trajectory):
        sample = each["tensors"]
        yield masked(
            sample["tokens"][-each["metadata"]["response_length"] :],
            sample["loss_mask"],
            sample["rollout_log_probs"],
        )


def read_trl_turns(trajectory: Trajectory) -> Iterator[Told]:
    for turns in trl.turn_records(trajectory):
        for before, turn in pairwise(turns):
            assert (
                turn["prompt_ids"][: len(before["prompt_ids"] + before["output_ids"])]
                == before["prompt_ids"] + before["output_ids"]
            )
        yield [
            pair
            for turn in turns
            for pair in masked(turn["output_ids"], turn["output_mask"], turn["output_log_probs"])
        ]


def read_trl_sequences(trajectory: Trajectory) -> Iterator[Told]:
    for row in trl.training_sequences(trajectory):
        yield masked(row["input_ids"], row["completion_mask"], row["old_log_probs"])


def read_prime_rl(trajectory: Trajectory) -> Iterator[Told]:
    for row in prime_rl.training_samples(trajectory, advantage=0.5):
        assert [bool(each) for each in row["advantages"]] == row["mask"]
        yield masked(row["token_ids"], row["mask"], row["logprobs"])


def read_skyrl(trajectory: Trajectory) -> Iterator[Told]:
    output = skyrl.generator_output([trajectory], step_wise=True)
    assert output["is_last_step"] == [False] * (len(output["rewards"]) - 1) + [True]
    for ids, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        yield masked(ids, mask, logprobs)


def read_nemo_rl(trajectory: Trajectory) -> Iterator[Told]:
    for row, trace in zip(nemo_rl.results(trajectory), trajectory.traces, strict=True):
        log = row["message_log"]
        assert [token for message in log for token in message["token_ids"]] == trace.token_ids.tolist()
        yield [
            pair
            for message in log
            if message["role"] == "assistant"
            for pair in zip(message["token_ids"], message["generation_logprobs"], strict=True)
        ]


def read_gym(trajectory: Trajectory) -> Iterator[Told]:
    for items in nemo_rl.gym_items(trajectory):
        seen: list[int] = []
        told: Told = []
        for item in items:  # as NeMo RL asserts it: each prompt starts with everything that was seen
            assert item["prompt_token_ids"][: len(seen)] == seen
            seen = item["prompt_token_ids"] + item["generation_token_ids"]
            told += zip(item["generation_token_ids"], item["generation_log_probs"], strict=True)
        yield told


def read_tinker(trajectory: Trajectory) -> Iterator[Told]:
    for row, trace in zip(tinker.datums(trajectory, advantage=2.0), trajectory.traces, strict=True):
        tensors = {name: each["data"] for name, each in row["loss_fn_inputs"].items()}
        [chunk] = row["model_input"]["chunks"]
        assert [*chunk["tokens"], tensors["target_tokens"][-1]] == trace.token_ids.tolist()  # shifted back
        assert chunk["tokens"][1:] == tensors["target_tokens"][:-1]
        assert tensors["advantages"] == [2.0 * one for one in tensors["mask"]]
        yield masked(tensors["target_tokens"], tensors["mask"], tensors["logprobs"])


def read_areal(trajectory: Trajectory) -> Iterator[Told]:
    for row in areal.tensors(trajectory):
        yield masked(row["input_ids"][0], row["loss_mask"][0], row["logprobs"][0])


def read_areal_rollout(trajectory: Trajectory) -> Iterator[Told]:
    batch: Any = areal.rollout([trajectory])
    for place, ids in enumerate(batch["input_ids"]):
        assert sum(batch["attention_mask"][place]) == len(trajectory.traces[place].token_ids)
        yield masked(ids, batch["loss_mask"][place], batch["logprobs"][place])


def read_atropos(trajectory: Trajectory) -> Iterator[Told]:
    data = atropos.scored_data([trajectory], advantages={trajectory.session_id: 1.0})
    for tokens, masks, logprobs in zip(
        data["tokens"], data["masks"], data["inference_logprobs"], strict=True
    ):
        assert all(one in (-100, token) for one, token in zip(masks, tokens, strict=True))
        assert all((logprob == 1.0) == (one == -100) for one, logprob in zip(masks, logprobs, strict=True))
        yield [(one, logprob) for one, logprob in zip(masks, logprobs, strict=True) if one != -100]


READERS: dict[str, Reader] = {
    name.removeprefix("read_"): each for name, each in globals().items() if name.startswith("read_")
}


@pytest.mark.parametrize("name", READERS)
@examples(60)
@given(session=published())
def test_trained_tokens_keep_their_place(name: str, session: Trajectory) -> None:
    """Every trained token is told again in its place."""
    assert list(READERS[name](session)) == [
        [(token, logprob) for token, logprob, _ in row] for row in trained(session)
    ]


@examples(100)
@given(tree=trees())
def test_tree_tokens_exported_once(tree: list[Trajectory]) -> None:
    """Every sampled token of a tree is told once."""
    own = [turn for session in tree for turn in session.turns if turn.index >= session.inherited]
    sampled = Counter(token for turn in own for token in turn.sampled)
    assert set(sampled.values()) == {1}
    assert set(sampled) == {token for session in tree for turn in session.turns for token in turn.sampled}
    for name, reader in READERS.items():
        told = Counter(token for session in tree for row in reader(session) for token, _ in row)
        assert told == sampled, name


@examples(60)
@given(session=published())
def test_trl_rollout_holds_one_row(session: Trajectory) -> None:
    """A trl rollout has room for one row."""
    for place, row in enumerate(trained(session)):
        output = trl.rollout_output([evolve(session, traces=session.traces[place : place + 1])])
        [told] = map(masked, output["completion_ids"], output["env_mask"], output["logprobs"])
        assert told == [(token, logprob) for token, logprob, _ in row]
        ids = session.traces[place].token_ids.tolist()  # what says that a row is truncated comes after it
        assert (output["prompt_ids"][0] + output["completion_ids"][0])[: len(ids)] == ids


@examples(60)
@given(session=published())
def test_versions_as_fine_as_format_allows(session: Trajectory) -> None:
    """Versions are said as finely as a format can."""
    told = [[version for _, _, version in row] for row in trained(session)]
    for row, expected in zip(areal.tensors(session), told, strict=True):
        versions, mask = row["versions"][0], row["loss_mask"][0]
        assert [str(version) for version, one in zip(versions, mask, strict=True) if one] == expected
        assert {version for version, one in zip(versions, mask, strict=True) if not one} <= {-1}
    for sample, expected in zip(slime.samples(session), told, strict=True):
        assert set(sample["weight_versions"]) == set(expected)
        assert len(sample["weight_versions"]) >= sum(1 for a, b in pairwise(expected) if a != b) + 1
    for output, expected in zip(verl.agent_loop_outputs(session), told, strict=True):
        steps = output["extra_fields"]
        assert (steps["min_global_steps"], steps["max_global_steps"]) == (
            min(map(int, expected)),
            max(map(int, expected)),
        )
    for one, expected in zip(trl.rollout_samples(session, advantage=1.0, group_id=0), told, strict=True):
        assert one["model_version"] == min(map(int, expected))
        assert one["metrics"].get("weight_versions", 1) == len(set(expected))


@examples(60)
@given(session=published())
def test_temperatures_match_sampled_tokens(session: Trajectory) -> None:
    """Temperatures are those each token was sampled with."""
    used = {turn.index: turn.used.temperature for turn in session.turns}
    for row, trace in zip(prime_rl.training_samples(session), session.traces, strict=True):
        expected = [1.0] * len(trace.token_ids)
        for span in trace.turn_spans:
            for place in range(span.start, span.end):
                if trace.loss_mask[place]:
                    expected[place] = used[span.turn] or 0.0
        assert row["temperatures"] == expected


@examples(60)
@given(session=published())
def test_experts_stand_where_their_positions_are(session: Trajectory) -> None:
    """The kit's experts tell their position: row p of a slice from `offset` on is p + offset."""
    samples, outputs, sequences = (
        slime.samples(session),
        verl.agent_loop_outputs(session, arrays="native"),
        prime_rl.training_samples(session),
    )
    for trace, sample, output, packed in zip(session.traces, samples, outputs, sequences, strict=True):
        if trace.routed is None:
            assert sample["rollout_routed_experts"] is None
            assert "routed_experts" not in output
            assert packed["routed_experts"] is None
            continue
        places = [place + trace.offset for place in range(len(trace.token_ids) - 1)]
        assert [row[0][0] for row in sample["rollout_routed_experts"]] == places
        assert output["routed_experts"][:, 1, 2].tolist() == places
        assert packed["routed_experts"]["shape"] == [len(trace.token_ids), 2, 3]
        assert len(packed["routed_experts"]["data"]) == len(trace.token_ids) * 6 * (
            2 if trace.routed.dtype == "int16" else 1
        )


@examples(60)
@given(session=published())
def test_teacher_logprobs_align_with_tokens(session: Trajectory) -> None:
    """A teachers logprobs stand where their tokens are."""
    known = taught(session)
    said = [list(trace.teacher_logprobs or ()) for trace in known.traces]
    masks = [[each == 1 for each in trace.loss_mask] for trace in known.traces]
    before = [[*each[1:], 0.0] for each in said]  # at the position that predicts the token
    for row, sample in zip(said, slime.samples(known), strict=True):
        assert sample["teacher_log_probs"] == row[len(row) - sample["response_length"] :]
    rows = [each["extra_fields"] for each in verl.agent_loop_outputs(known)]
    assert [[one for [one] in row["teacher_logprobs"]] for row in rows] == before
    batch: Any = areal.rollout([known])
    for row, padded in zip(before, batch["teacher_logp"], strict=True):
        assert padded == row + [0.0] * (len(padded) - len(row))
    assert [sample["ref_logprobs"] for sample in prime_rl.training_samples(known)] == said
    nodes = [value for node in prime_rl.trace_nodes(known) for value in node.get("reference_logprobs", ())]
    told = [[value for value, one in zip(*row, strict=True) if one] for row in zip(said, masks, strict=True)]
    assert nodes == [value for row in told for value in row]
    data = atropos.scored_data([known], advantages={known.session_id: 1.0})["distill_logprobs"]
    candidates = trl.distillation_samples(known, teacher_id="big", prompt_id=0)
    for posted, sample, mask, row in zip(data, candidates, masks, told, strict=True):
        for columns in (posted, sample["teacher_topk_logprobs"]):
            assert [value for [value], one in zip(columns, mask, strict=True) if one] == row
        assert [one != -1 for [one] in sample["teacher_topk_ids"]] == mask
