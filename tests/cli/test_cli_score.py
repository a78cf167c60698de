"""`polarnode score` on a node of simulated engines, whose scores are made up, and the same each time. Real ones
are in tests/engine/test_scoring_real.py.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from client_kit import KINDS, here, open_client
from openai import OpenAI

from polarnode.cli import score
from polarnode.cli.main import main as command
from polarnode.client import PolarnodeClient
from polarnode.core.arrays import ids
from polarnode.core.task import CaptureSpec
from polarnode.core.trajectory import sequence
from polarnode.engine.protocol import Simulation
from polarnode.engine.simulated.answers import simulated_scores
from polarnode.node.config import TINY_MODEL, NodeConfig, TeacherConfig
from polarnode.node.opening import open_node
from polarnode.node.serving import serve_control_plane


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = NodeConfig(
        engine="simulated",
        simulated=Simulation(tokens_per_s=0, first_token_s=0, answer_tokens=12),
        port=0,
        state_dir=str(tmp_path_factory.mktemp("node")),
        containers=False,
        teachers={"large": TeacherConfig(model=str(TINY_MODEL), engine="simulated")},
    )
    with here() as thread:
        node = thread.open(open_node(config, report=print))
        address = thread.open(serve_control_plane(node))
        yield f"http://127.0.0.1:{address.port}"


@pytest.fixture(scope="module")
def session(url: str) -> str:
    """A finished session of three turns in one row."""
    with PolarnodeClient(url).capture(CaptureSpec()) as capture:
        agent: Any = OpenAI(base_url=capture.openai_base_url, api_key=capture.key)
        messages: list[dict[str, str]] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Write kiwi to out{turn}.txt, please."})
            answer = agent.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    return capture.session_id


def polarnode(url: str, *argv: str) -> Result:
    return CliRunner().invoke(command, ["score", *argv, "--url", url], prog_name="polarnode")


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_match_engine_scores(kind: str, url: str, session: str) -> None:
    with open_client(kind, url) as client:
        found = client.score_session(session, weights="large")
        turns = {turn.index: turn for turn in client.trajectory(session, turns="full").turns}
    assert [each.turn for each in found.tokens] == [0, 1, 2]
    for each in found.tokens:
        turn = turns[each.turn]
        row = sequence(turns, each.turn)
        assert (each.token_ids, each.old) == (turn.sampled, turn.logprobs)
        assert each.new == simulated_scores(ids(row), turn.prompt_length)
    assert (found.engine, found.scored_by, set(found.versions)) == ("large", ("large",), {"0"})


def test_table_and_json_of_scores(url: str, session: str) -> None:
    """The table has a row for each turn, and the JSON every token."""
    shown = polarnode(url, session)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == f"session {session} under policy (weights 0); logprobs in nats"
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "all"]
    raw = json.loads(polarnode(url, session, "--weights", "0", "--json").output)
    assert raw["total"]["tokens"] == sum(len(each["new"]) for each in raw["tokens"])
    assert (raw["engine"], raw["scored_by"], len(raw["spans"])) == ("policy", ["0"], 3)
    every = polarnode(url, session, "--tokens").output.splitlines()
    assert len(every) == len(lines) + 1 + raw["total"]["tokens"]
    assert tuple(every[len(lines)].split()) == score.TOKENS
    first = raw["tokens"][0]
    assert every[len(lines) + 1].split()[:3] == ["0", "0", str(first["token_ids"][0])]


def test_unscorable_session_is_one_sentence(url: str, session: str) -> None:
    other = polarnode(url, session, "--weights", "17")
    assert other.exit_code == 1
    assert "does not hold the weights '17', and scores by 0 (policy), the teacher large" in other.output
    missing = polarnode(url, "nosuch")
    assert (missing.exit_code, missing.output.count("\n")) == (1, 1), missing.output
    assert "nosuch" in missing.output
