"""New weights in the middle of a session, in the middle of its samples: each token's logprob is that of the
weights its version span names.

The node runs in this process, to see when it samples; its weights are changed by its HTTP route, from the
embedded ones to others and back, while an agent in its container speaks without a pause; the rows are then
read by transformers under both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from control_plane_parts import Caller
from engine_reference import TOLERANCE
from live_kit import AGENT, PATIENCE_S, POLL_S, free_port

from polarnode.core import codec
from polarnode.core.trajectory import Trace, Trajectory
from polarnode.journal import queries
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.node import Node
from polarnode.node.opening import open_node
from polarnode.node.serving import serve_control_plane

# torch and transformers warn of themselves
pytestmark = [pytest.mark.podman, pytest.mark.engine, pytest.mark.filterwarnings("default")]

OTHER = "other"
HEAT = 3.0  # nearly every sample is then cut by its length: there is always one to swap the weights in
TASK: dict[str, Any] = {
    "instruction": "Say a word.",
    "harness": {"name": "shell", "command": ["python3", "/work/agent.py", '{"turns": 6, "max_tokens": 600}']},
    "runtime": {"files": [{"path": "agent.py", "text": AGENT.read_text()}]},
    "sampling": {"temperature": HEAT},
    "budgets": {"run_s": 300.0},
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with every weight somewhat off, its tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("weights") / OTHER
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(path)
    return path


async def test_token_weights_match_its_span(
    podman_works: None, other: Path, tmp_path: Path, temporary: Path
) -> None:
    settings = NodeConfig(
        cpu=True,
        port=free_port(),
        state_dir=str(tmp_path / "state"),
        node_id=f"weights-{tmp_path.name}",
        run_limit=1,
        warm=0,
    )
    with trio.fail_after(2 * PATIENCE_S):
        async with open_node(settings, report=print) as node:
            session = (await node.submit(codec.read_task(TASK), idempotency_key=None)).session_ids[0]
            async with serve_control_plane(node) as address:
                trainer = Caller(url=f"http://127.0.0.1:{address.port}")
                for version, path in ((OTHER, other), ("back", TINY_MODEL)):
                    await speaking(node)
                    body = {
                        "version": version,
                        "mode": "retract",
                        "source": {"kind": "disk", "path": str(path)},
                    }
                    answer = await trainer.post("/v1/weights", body)
                    assert answer.status == 201, answer.text
            trajectory = await over(node, session)
    versions = [tuple(span.version for span in turn.version_spans) for turn in trajectory.turns]
    print(trajectory.outcome, versions)
    assert any(len(spans) > 1 for spans in versions), "no sample had its weights changed under it"
    assert len(trajectory.traces) == 1
    judged(trajectory.traces[0], {"back": TINY_MODEL, OTHER: other})


async def speaking(node: Node) -> None:
    """Wait until a sample has been under way for a moment."""
    while not any(host.running for host in node.engines.statistics().hosts):  # noqa: ASYNC110 - nobody tells of it
        await trio.sleep(POLL_S)
    await trio.sleep(4 * POLL_S)  # some of its tokens are to be of the weights before


async def over(node: Node, session: str) -> Trajectory:
    while (found := await node.journal.reader.query(queries.trajectory, session)) is None:  # noqa: ASYNC110 - nobody tells of it
        await trio.sleep(POLL_S)
    return found


def judged(trace: Trace, models: dict[str, Path]) -> None:
    """Each version's tokens under its own weights, and under the others: there they must be off, or this
    shows nothing.
    """
    own = {version: logprobs(path, trace.token_ids) for version, path in models.items()}
    own[trace.version_spans[0].version] = own["back"]  # the weights the engine began with
    assert {span.version for span in trace.version_spans} == own.keys()
    for version in own:  # all its spans together: one may be of two tokens, which other weights say alike
        spans = [range(span.start, span.end) for span in trace.version_spans if span.version == version]
        places = [at for span in spans for at in span if trace.loss_mask[at]]
        assert worst(trace, own[version], places) < TOLERANCE, version
        assert worst(trace, own[OTHER if version != OTHER else "back"], places) > TOLERANCE, version


def logprobs(path: Path, ids: Sequence[int]) -> list[float]:
    """Of each token behind all before it, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            .eval()(torch.tensor([list(ids)]))
            .logits[0, :-1]
        )
    own = torch.log_softmax(logits / HEAT, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [0.0, *map(float, own)]


def worst(trace: Trace, own: Sequence[float], places: Sequence[int]) -> float:
    return max(abs(trace.logprobs[at] - own[at]) for at in places)
