"""verl's plug-in, run in verl 0.9.1's own classes and functions (verl_program.py)."""

from typing import Any

import pytest
from plugin_kit import run_program
from trainers_kit import one_row, session_of_two_rows, taught
from verl_program import ROW, versions

from polarnode.trainers import verl


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What came of a prompt whose sessions had one row, two, slices, none but a reward, and none at all."""
    found: dict[str, Any] = run_program("verl_program.py")
    return found


def test_sample_is_session_of_group(made: dict[str, Any]) -> None:
    assert made["task"] == ["u1", "fix it", 3, 0.7, -1, 0.0]
    assert list(made["fields"]) == ["u1_0_0", "u1_1_0", "u1_1_1", "u1_2_0", "u1_2_1"]


def test_unusable_session_is_no_zero_reward(made: dict[str, Any]) -> None:
    """verl counts a sample that raised as a failure; what it put into its queue is all that a group has."""
    assert made["errors"] == [
        "session s0 is not usable: no trainable token",
        "session s0 was lost: it was so",
    ]
    assert not any(key.startswith(("u1_3_", "u1_4_")) for key in made["fields"])


def test_worker_and_own_queue_fields_match(made: dict[str, Any]) -> None:
    """The fields that V1 reads back: `uid` for the group, `data_source` and `reward_model` of its metrics, and
    of a session with a teacher its logprobs in every row.
    """
    assert "teacher_logprobs" not in made["fields"]["u1_0_0"]
    assert made["fields"]["u1_1_1"]["teacher_logprobs"] == [[0], [0], [-1.25], [0]]
    for place, session in enumerate(
        (one_row(), taught(session_of_two_rows(reward=0.0, lineage_rewards={1: 5.0})))
    ):
        plain = versions(session, "")
        for ours in verl.transfer_rows(plain, uid="u1", global_steps=9, prompt=ROW, session=place):
            theirs = made["fields"][ours["key"]]
            del theirs["extra_fields"]["polarnode"], ours["fields"]["extra_fields"]["polarnode"]
            assert theirs == ours["fields"]
            assert made["tags"][ours["key"]] == ours["tag"]


def test_session_has_one_advantage(made: dict[str, Any]) -> None:
    """Rewards 1, 0, 0.25 over three sessions. A lineage's own reward of 5 is not its session's."""
    found = made["trained"]["advantages"]
    assert found["u1_0_0"] == [1.1209]
    assert found["u1_1_0"] == found["u1_1_1"] == [-0.8006]
    assert found["u1_2_0"] == found["u1_2_1"] == [-0.3203]


def test_gradient_only_on_sampled_tokens(made: dict[str, Any]) -> None:
    assert made["trained"]["gradient"] == made["trained"]["sampled"]
    assert sum(map(sum, made["trained"]["gradient"])) == 5 + 3 + 5


def test_weight_steps_are_whole_numbers(made: dict[str, Any]) -> None:
    assert made["trained"]["staleness"] == [7, 7, 8, 7, 7]
    unknown = made["unknown_versions"]
    assert unknown["sync"] == [8]  # of step 9, whose samples are all of the weights before
    assert "trainer_mode=colocate_async counts in them" in unknown["colocate_async"]


def test_agent_loop_refuses_row_estimators(made: dict[str, Any]) -> None:
    assert "use grpo, which compares sessions" in made["refused"]


def test_refused_settings_end_the_run(made: dict[str, Any]) -> None:
    """In the driver, before a sample is asked for: verl replaces samples that fail without end."""
    fine, *refused = made["refused_first"]
    assert fine == ""
    for said, sentence in zip(
        refused, ("use grpo, which compares sessions", "sandbox_fusion.url", "group.min_usable"), strict=True
    ):
        assert sentence in said


def test_rank_0_sends_gathered_weights(made: dict[str, Any]) -> None:
    said = made["weights"]
    [(version, names, settings)] = said["pushed"]
    assert version.startswith("r-")
    assert version.endswith("-1")
    assert (names, settings) == (["a", "b", "c"], {"folder": "/steps", "model": "/model"})
    assert said["gathered"][3:6] == [[1, "a"], [1, "b"], [1, "c"]]


def test_adapter_is_sent_without_base(made: dict[str, Any]) -> None:
    """An adapter is sent without its base, and the tasks name it."""
    name, version, names, config = made["weights"]["adapter"]
    assert (name, version[-2:], names, config) == ("r", "-1", ["a", "b", "c"], {"r": 8})
    assert made["adapters"] == [None, "r", "r", None]


def test_refused_update_blocks_no_rank(made: dict[str, Any]) -> None:
    said = made["weights"]
    assert said["refused"] == "refused"
    assert [name for _, name in said["gathered"][said["before"] :]] == ["a", "b", "c"]


def test_verl_finds_plug_in_by_name(made: dict[str, Any]) -> None:
    assert made["weights"]["registered"] == {
        "rollout": "polarnode.integrations.verl.NodeWeights",
        "replica": "NodeReplica",
        "loop": {"polarnode": {"_target_": "polarnode.integrations.verl.PolarnodeAgentLoop"}},
    }
