"""Real harnesses, unmodified, in their containers against the real engine. The policy is tiny and sampled:
only structure can be asserted.

They run side by side, as sessions do; what they left is then checked with nothing of ours by
`examples/verify.py`.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live_kit import ServingNode

from polarnode.core.conversation import TextPart
from polarnode.core.trajectory import Trajectory, Turn

pytestmark = [pytest.mark.podman, pytest.mark.engine, pytest.mark.harness]

ROOT = Path(__file__).parents[2]
LONG_PROMPT = 15_000  # tokens: Claude Code's first prompt is 19 322 of polarnode-tiny's

USUAL = {"temperature": 1.0, "max_tokens": 256}
# nearly uniform: hardly a sample ends by itself, and Claude Code asks for the rest
CUT = {"temperature": 100.0, "max_tokens": 48}

HARNESSES: dict[str, dict[str, Any]] = {
    "claude_code": {"name": "claude_code"},
    "claude_code cut short": {"name": "claude_code"},
    "pi": {"name": "pi"},
    "pi anthropic": {"name": "pi", "settings": {"api": "anthropic-messages"}},
    "mini_swe_agent": {"name": "mini_swe_agent"},
    "mini_swe_agent anthropic": {"name": "mini_swe_agent", "settings": {"api": "anthropic"}},
    "codex": {"name": "codex"},
    "gemini_cli": {"name": "gemini_cli"},
}
# on an answer cut by its limit, the first only after three in a row
GIVES_UP = {"cut", "codex", "gemini_cli"}


@pytest.fixture(scope="module")
def trajectories(node: ServingNode) -> dict[str, Trajectory]:
    """One session of each harness, all at once."""
    submitted = {
        name: node.submit(**task(harness, CUT if "cut" in name else USUAL))[0]
        for name, harness in HARNESSES.items()
    }
    found = {name: node.finished(session) for name, session in submitted.items()}
    for name, trajectory in found.items():
        print(
            name,
            trajectory.outcome.status,
            f"{trajectory.timing.run_s:.1f} s",
            [described(turn) for turn in trajectory.turns],
        )
    return found


def task(harness: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "instruction": "Copy the word in notes.txt to result.txt.",
        "harness": harness,
        "runtime": {"files": [{"path": "notes.txt", "text": "kiwi\n"}]},
        "evaluator": {"name": "command", "config": {"script": 'test "$(cat /work/result.txt)" = "kiwi"'}},
        "budgets": {"run_s": 300, "max_turns": 6},
        "sampling": sampling,
    }


def described(turn: Turn) -> str:
    return f"{turn.kind}/{turn.reason} {turn.state} {turn.prompt_length}+{len(turn.sampled)}"


@pytest.mark.parametrize("name", HARNESSES)
def test_harness_completes_a_session(trajectories: dict[str, Trajectory], name: str) -> None:
    trajectory = trajectories[name]
    expected = (
        ("completed", "timeout", "failed") if GIVES_UP & set(name.split()) else ("completed", "timeout")
    )
    assert trajectory.outcome.status in expected, trajectory.outcome
    assert trajectory.outcome.clock != "run", "it ended by itself or by its turns"
    assert trajectory.reward in (0.0, 1.0)
    complete = [turn for turn in trajectory.turns if turn.state == "complete"]
    assert complete
    assert {turn.index for turn in complete} <= {
        span.turn for trace in trajectory.traces for span in trace.turn_spans
    }
    assert {turn.provider for turn in trajectory.turns} == {provider_of(name)}


def provider_of(name: str) -> str:
    return {"codex": "openai_responses", "gemini_cli": "google"}.get(name) or (
        "anthropic" if "claude" in name or "anthropic" in name else "openai_chat"
    )


@pytest.mark.parametrize(
    "name", [name for name in HARNESSES if "claude" not in name and "gemini" not in name]
)
def test_undisturbed_session_is_one_lineage(trajectories: dict[str, Trajectory], name: str) -> None:
    """They send what they were told, and nothing else: each turn extends the one before, and one sequence
    holds them all.

    But mini-swe-agent: it takes an answer without a call back out, and asks anew.
    """
    turns = [turn for turn in trajectories[name].turns if turn.state == "complete"]
    after_calls = [
        later for earlier, later in pairwise(turns) if earlier.answer is not None and earlier.answer.calls
    ]
    assert [turn.kind for turn in after_calls] == ["extend"] * len(after_calls)
    if len(after_calls) == len(turns) - 1:
        assert len(trajectories[name].traces) == 1


@pytest.mark.parametrize("name", ["claude_code", "claude_code cut short"])
def test_claude_code_streams_long_prompts(trajectories: dict[str, Trajectory], name: str) -> None:
    """Where an answer had no visible text it asks anew, and leaves that answer out: more than one root is
    then its own doing.
    """
    first = trajectories[name].turns[0]
    assert (first.kind, first.state, first.role) == ("root", "complete", "main")
    assert all(turn.prompt_length > LONG_PROMPT for turn in trajectories[name].turns)


def test_claude_code_continues_cut_answer(trajectories: dict[str, Trajectory]) -> None:
    """Its own "Resume directly" extends the cut sample, token for token: twenty thousand tokens are one
    sequence for all of these turns.
    """
    turns = trajectories["claude_code cut short"].turns
    after_text = [
        later
        for earlier, later in pairwise(turns)
        if earlier.finish_reason == "length" and shows_text(earlier)
    ]
    assert [turn.kind for turn in after_text] == ["extend"] * len(after_text)


def shows_text(turn: Turn) -> bool:
    """Only text, and some that can be seen: what Claude Code keeps of an answer that was cut."""
    parts = turn.answer.parts if turn.answer is not None else ()
    return bool(parts) and all(isinstance(part, TextPart) and part.text.strip() for part in parts)


def test_trajectories_verify_without_polarnode(
    trajectories: dict[str, Trajectory], node: ServingNode, tmp_path: Path
) -> None:
    """Every session this node ran so far, timed out, cancelled and failed ones too: plain transformers finds
    the recorded logprobs.
    """
    lines = [json.dumps(row) for row in node.client.export(arrays="json", turns="full") if row["traces"]]
    assert len(lines) >= len(trajectories)
    file = tmp_path / "trajectories.jsonl"
    file.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "verify.py"), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
