"""Our projections in the hands of the trainers' own packages: verl, SkyRL, AReaL, Tinker, Atropos, and TRL's
GRPOTrainer itself.

The packages run in programs of their own (trainers_program.py, trl_program.py), one for all that is quick and
one for TRL.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainers_kit import group_of, one_row, session_of_two_rows, session_without_rows, taught

import polarnode
from polarnode.trainers import Absent, areal, atropos, of_roles, skyrl, tinker, trl, verl

HERE = Path(__file__).parents[1] / "kits"
TINY = Path(polarnode.__file__).parent / "models" / "tiny"
SESSION = one_row(turn_rewards={0: 0.25})
TAUGHT = taught(one_row())


def run(program: str, asked: Any) -> Any:
    said = subprocess.run(
        [sys.executable, HERE / program],
        input=json.dumps(asked).encode(),
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert said.returncode == 0, said.stderr.decode()[-4000:]
    return json.loads(said.stdout)


def areal_calls() -> list[dict[str, Any]]:
    """The two calls of the session, as AReaL's own engine would have recorded them."""
    first = {
        "input": [10, 11, 12],
        "output": [20, 21],
        "logprobs": [-0.5, -0.625],
        "versions": [7, 7],
        "reward": 1.0,
    }
    whole = [10, 11, 12, 20, 21, 13, 14]
    return [
        first,
        {
            "input": whole,
            "output": [22, 23, 24],
            "logprobs": [-1.5, -1.625, -1.75],
            "versions": [7, 8, 8],
            "reward": 1.0,
        },
    ]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What each package made of the same session, asked once."""
    rows = {
        "turns": trl.turn_records(SESSION),
        "sequences": trl.training_sequences(SESSION),
        "samples": trl.rollout_samples(SESSION, advantage=0.5, group_id=3),
    }
    asked = {
        "verl": verl.agent_loop_outputs(SESSION),
        "verl_teacher": [
            *verl.agent_loop_outputs(TAUGHT),
            *verl.agent_loop_outputs(taught(session_of_two_rows())),
        ],
        "skyrl": skyrl.generator_output(
            [SESSION, session_of_two_rows(sample_index=1), session_without_rows(sample_index=2)],
            absent=Absent(token_id=0, reward=0.0),
            step_wise=True,
            experts=False,
        ),
        "areal": areal_calls(),
        "tinker": [
            *tinker.datums(SESSION, advantage=0.5),
            *tinker.datums(TAUGHT, advantage=0.5, kl_penalty_coef=2.0),
        ],
        "atropos": [
            atropos.scored_data(
                [SESSION, session_of_two_rows(sample_index=1)], advantages={"s0": 0.5, "s1": -0.5}
            ),
            atropos.scored_data([TAUGHT, taught(one_row(sample_index=1))], env_id=0, group_size=2),
        ],
        "trl_async": rows,
        "trl_distillation": trl.distillation_samples(TAUGHT, teacher_id="big", prompt_id=4),
    }
    found: dict[str, Any] = run("trainers_program.py", asked)
    return found


def test_verl_queue_matches_agent_loop(told: dict[str, Any]) -> None:
    [theirs] = told["verl"]
    [ours] = verl.transfer_rows(SESSION, uid="u", global_steps=9)
    for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "routed_experts", "rm_scores"):
        assert theirs[name]["data"] == ours["fields"][name], name
    types = {
        name: theirs[name]["dtype"]
        for name in (
            "prompts",
            "responses",
            "response_mask",
            "rollout_log_probs",
            "routed_experts",
            "rm_scores",
        )
    }
    tensors = verl.transfer_rows(SESSION, uid="u", global_steps=9, arrays="native")[0]["fields"]
    assert {name: str(tensors[name].dtype) for name in types} == types
    assert theirs["extra_fields"] == ours["fields"]["extra_fields"]
    assert theirs["num_turns"] == 4
    assert ours["key"] == "u_0_0"
    assert ours["tag"] == {
        "status": "success", "prompt_len": 3, "response_len": 7, "seq_len": 10, "global_steps": 9, "min_global_steps": 7, "max_global_steps": 8,
    }  # fmt: skip


def test_verl_reads_teacher_logprobs(told: dict[str, Any]) -> None:
    """verl 0.9.1, `compute_distillation_loss_reverse_kl_estimator` (trainer/distillation/losses.py)."""
    rows = [*TAUGHT.traces, *taught(session_of_two_rows()).traces]
    said = [[*list(row.teacher_logprobs or ())[row.prompt_length :]] for row in rows]
    assert told["verl_teacher"]["teacher_logprobs"] == [each + [0] * (7 - len(each)) for each in said]
    ids = [[*row.token_ids[row.prompt_length :]] for row in rows]
    assert told["verl_teacher"]["teacher_ids"] == [each + [0] * (7 - len(each)) for each in ids]
    for session in (TAUGHT, taught(session_of_two_rows())):
        queued = verl.transfer_rows(session, uid="u", global_steps=9, arrays="native")
        looped = verl.agent_loop_outputs(session, arrays="native")
        for one, other in zip(queued, looped, strict=True):
            for name in ("teacher_ids", "teacher_logprobs"):
                field = one["fields"][name]
                assert field.tolist() == other["extra_fields"][name].tolist()
                assert (field.ndim, str(field.dtype)) == (2, str(other["extra_fields"][name].dtype))
    batch = verl.data_proto([TAUGHT, taught(session_of_two_rows())], pad_token_id=0)["batch"]
    assert [each[0] for each in batch["teacher_logprobs"][0]] == [
        0,
        0,
        *told["verl_teacher"]["teacher_logprobs"][0],
        0,
    ]


def test_areal_matches_our_projection(told: dict[str, Any]) -> None:
    [ours] = areal.tensors(SESSION)
    theirs = told["areal"]
    newer = {"turn_ids", "original_rewards", "truncated"}  # of AReaL after 1.0.4, and our own
    assert set(ours) - set(theirs) == newer
    [tensors] = areal.tensors(SESSION, arrays="native")
    for name, each in theirs.items():
        assert each["data"] == ours[name]
        assert (each["dtype"], each["shape"]) == (str(tensors[name].dtype), list(tensors[name].shape)), name


def test_tinker_datum_round_trips(told: dict[str, Any]) -> None:
    assert told["tinker"] == [
        {
            "input": [10, 11, 12, 20, 21, 13, 14, 22, 23],
            "target_tokens": [11, 12, 20, 21, 13, 14, 22, 23, 24],
            "logprobs": [0, 0, -0.5, -0.625, 0, 0, -1.5, -1.625, -1.75],
            "advantages": [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5],
            "mask": [0, 0, 1, 1, 0, 0, 1, 1, 1],
        },
        # thinking-machines-lab/tinker-cookbook 9dfcc3a2, distillation/train_on_policy.py: plus -2 * reverse KL
        told["tinker"][0] | {"advantages": [0, 0, 1, 1, 0, 0, 1, 1, 1]},
    ]


def test_atropos_takes_whole_group(told: dict[str, Any]) -> None:
    theirs = told["atropos"]["held"][0]
    assert theirs["masks"][0] == [-100, -100, -100, 20, 21, -100, -100, 22, 23, 24]
    assert theirs["inference_logprobs"][0] == [1, 1, 1, -0.5, -0.625, 1, 1, -1.5, -1.625, -1.75]
    assert theirs["advantages"][1] == [0, 0, -0.5, -0.5]
    assert (theirs["scores"], theirs["env_id"]) == ([1.0, 1.0, 1.0], None)
    assert theirs["distill_logprobs"] is None
    both = told["atropos"]["held"][1]
    assert both["distill_token_ids"][0] == [[token] for token in both["tokens"][0]]
    said = [1, 1, 1, -0.25, -0.375, 1, 1, -1.25, -1.375, -1.5]
    assert both["distill_logprobs"] == [[[each] for each in said]] * 2


def test_atropos_queues_posts_at_once(told: dict[str, Any]) -> None:
    """A group of three sequences without an env_id, and one of the two that its environment registered."""
    assert told["atropos"]["answers"] == ["received", "received"]
    assert told["atropos"]["queued"] == [3, 2]


def test_skyrl_takes_mixed_row_counts(told: dict[str, Any]) -> None:
    """SkyRL takes a batch of which sessions have one row, two and none."""
    output = skyrl.generator_output([SESSION], arrays="native")
    assert set(output) <= set(told["skyrl"]["fields"])
    assert told["skyrl"]["ids"] == ["g_0", "g_1", "g_1", "g_2"]
    assert output["rollout_expert_indices"][0].shape == (10, 2, 3)


def test_async_grpo_chains_our_turns(told: dict[str, Any]) -> None:
    """TRL's own chaining, told each turn's whole prompt, comes to the row without a fork or a realignment."""
    assert told["trl_async"]["chained"] == told["trl_async"]["given"]


def test_async_distillation_reads_teacher_logprobs(told: dict[str, Any]) -> None:
    assert told["trl_distillation"] == [
        {"logprobs": [-0.25, -0.375, -1.25, -1.375, -1.5], "places": [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]}
    ]


def test_grpo_trainer_takes_rollout_func_group() -> None:
    """The trainer's own path: its checks, its padding, its rewards, its mask of what is not the model's."""
    group = group_of(SESSION, of_roles(one_row(sample_index=1, reward=0.0), "main"))
    output = trl.rollout_output(
        [*group.usable, session_without_rows(sample_index=2)], absent=Absent(token_id=0)
    )
    found = run("trl_program.py", {"output": output, "model": str(TINY), "generations": 3})
    inputs = found["inputs"]
    assert inputs["completion_ids"][0] == SESSION.traces[0].token_ids.tolist()[3:]
    assert inputs["prompt_ids"][0] == [10, 11, 12]
    assert inputs["tool_mask"] == [[1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]
    # of the session without a row, one token, which tool_mask takes out
    assert inputs["completion_mask"][2] == [1, 0, 0, 0, 0, 0, 0]
    assert inputs["sampling_per_token_logps"][0] == SESSION.traces[0].logprobs.tolist()[3:]
    assert found["seen"] == {
        "reward": [1.0, 0.0, None],
        "session_id": ["s0", "s1", "s2"],
        "group_id": ["g", "g", "g"],
    }
    better, worse, nothing = inputs["advantages"]
    assert better == -worse > 0
    assert nothing == 0
