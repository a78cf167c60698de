"""Speculative decoding: what is refused because SGLang would not hold it, what is counted, and whose tensors an
update loads.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trio
from fakes_engine import order, sample

from polarnode.core.conversation import Sampling
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import LogitSteering
from polarnode.engine.calls import check_order
from polarnode.engine.checkpoints import BadCheckpoint, Kind, check_whole, draft_tensors
from polarnode.engine.drafts import draft_refusal, inexact
from polarnode.engine.embedded.control import DraftTotals
from polarnode.engine.engines import open_engines
from polarnode.engine.external import UnfitServer, Wanted
from polarnode.engine.external_sglang import SglangServer
from polarnode.engine.protocol import Piece, Simulation
from polarnode.engine.settings import EngineSettings, SimulatedEngine, check
from polarnode.node.config import TINY_MODEL
from polarnode.node.settings import simulated_marks
from polarnode.tokens.template import load_model

PROGRAM = Path(__file__).parents[1] / "kits" / "drafts_program.py"

# ── at the start ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "more", "sentence"),
    [
        ({"speculative_algorithm": "NGRAM"}, {"cpu": True}, "speculative_algorithm=NGRAM needs a GPU"),
        ({"speculative_algorithm": "eagle3"}, {"cpu": True}, "speculative_algorithm=EAGLE3 needs a GPU"),
        ({"speculative_algorithm": "NGRAM"}, {"routes": True}, "--routed-experts: SGLang reports none with"),
        ({"speculative_algorithm": "UNO"}, {}, "gives no logprobs of sampled tokens"),
        ({"speculative_accept_threshold_single": 0.9}, {}, "threshold_single=0.9, which accepts tokens"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 0.5},
            {},
            "threshold_acc=0.5, which accepts tokens",
        ),
        (
            {"speculative_algorithm": "EAGLE"},
            {"environment": {"SGLANG_SIMULATE_ACC_LEN": "3"}},
            "SGLANG_SIMULATE_ACC_LEN=3 accepts drafts",
        ),
    ],
)
def test_inexact_drafts_are_refused(arguments: Any, more: Any, sentence: str) -> None:
    found = draft_refusal(arguments, **({"cpu": False, "routes": False, "environment": {}} | more))
    assert found is not None
    assert sentence in found


def test_exact_drafts_are_allowed() -> None:
    one = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1}
    for arguments in ({}, {"speculative_algorithm": None}, {"speculative_algorithm": "EAGLE", **one}):
        assert draft_refusal(arguments, cpu=not one.keys() & arguments, routes=True, environment={}) is None
    assert inexact({"speculative_algorithm": "NGRAM"}) is None


def test_cpu_node_refuses_drafts_early(tmp_path: Path) -> None:
    """Not that it has no usable GPU, and before an engine is started."""
    settings = EngineSettings(
        model_path=TINY_MODEL, device="cpu", state_dir=tmp_path, extra={"speculative_algorithm": "NGRAM"}
    )
    with pytest.raises(EngineError, match="needs a GPU: SGLang has no kernels that verify drafts on a CPU"):
        check(settings)


def test_external_server_needs_exact_drafts() -> None:
    server = SglangServer(Wanted(url="http://a:1", vocab_size=9), None)  # type: ignore[arg-type]
    server._check({"speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 1.0})
    server._check({"speculative_algorithm": None, "speculative_accept_threshold_acc": 0.5})
    with pytest.raises(
        UnfitServer, match=r"http://a:1 was started with speculative_accept_threshold_acc=0.5"
    ):
        server._check({"speculative_algorithm": "EAGLE", "speculative_accept_threshold_acc": 0.5})


# ── of a call ───────────────────────────────────────────────────────────

UNHELD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("min_p", {"sampling": Sampling(min_p=0.1)}),
    ("frequency_penalty", {"sampling": Sampling(frequency_penalty=-0.5)}),
    ("presence_penalty", {"sampling": Sampling(presence_penalty=2.0)}),
    ("repetition_penalty", {"sampling": Sampling(repetition_penalty=1.1)}),
    ("steering", {"steering": LogitSteering(processor="p", parameters={})}),
)
HELD = Sampling(
    temperature=0.7, top_p=0.9, top_k=5, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0,
    repetition_penalty=1.0,
)  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), UNHELD)
def test_sampling_unsupported_with_drafts_is_refused(name: str, fields: dict[str, Any]) -> None:
    limits = {"vocab_size": 2304, "context_length": 4096}
    with pytest.raises(Refused, match=f"{name} cannot be held by this engine") as refused:
        check_order(order([1, 2], **fields), drafts="EAGLE", **limits)
    assert refused.value.path == f"$.{name}"
    check_order(order([1, 2], **fields), **limits)
    check_order(order([1, 2], sampling=HELD), drafts="EAGLE", **limits)


async def test_simulated_engine_reports_drafts(tmp_path: Path) -> None:
    model = load_model(TINY_MODEL)
    simulated = SimulatedEngine(
        simulation=Simulation(tokens_per_s=0, first_token_s=0, prefill_tokens_per_s=0),
        marks=simulated_marks(model.family),
        vocab_size=model.tokenizer.vocab_size,
    )
    settings = EngineSettings(
        model_path=TINY_MODEL, device="cpu", gpus=(0,), state_dir=tmp_path, simulated=simulated,
        extra={"speculative_algorithm": "NGRAM"},
    )  # fmt: skip
    with trio.fail_after(60):
        async with open_engines(settings) as engine:
            assert engine.drafts == "NGRAM"
            with pytest.raises(Refused, match=r"min_p cannot be held by this engine, which drafts"):
                await sample(engine, order([1, 2], sampling=Sampling(min_p=0.5)))
            assert await sample(engine, order([1, 2], sampling=Sampling(max_tokens=3)))


# ── counted ─────────────────────────────────────────────────────────────


def test_each_piece_counts_own_drafts() -> None:
    totals = DraftTotals()
    told = [(0, 0, 0), (22, 3, 2), (22, 3, 2), (55, 9, 5)]
    names = ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct")
    piece = Piece(rid="1" * 32, ids=b"", logprobs=b"", version="0")
    found = [totals.grown(piece, dict(zip(names, each, strict=True))) for each in told]
    assert [(each.drafted, each.accepted, each.verified) for each in found] == [
        (0, 0, 0), (22, 3, 2), (0, 0, 0), (33, 6, 3),
    ]  # fmt: skip
    assert DraftTotals().grown(piece, {}) is piece


# ── whose tensors an update loads ───────────────────────────────────────

KIND = Kind((1,), "F32")
NEXTN = dict.fromkeys(
    (
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.eh_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.10.mlp.up_proj.weight",
        "lm_head.weight",
    ),
    KIND,
)
OWN = {
    "model.layers.0.mlp.up_proj.weight": KIND,
    "mtp.fc.weight": KIND,
    "model.mtp_layers.0.norm.weight": KIND,
}


def test_draft_layers_are_recognised() -> None:
    assert draft_tensors(NEXTN) == {"model.layers.1.eh_proj.weight", "model.layers.1.mlp.up_proj.weight"}
    assert draft_tensors(OWN) == {"mtp.fc.weight", "model.mtp_layers.0.norm.weight"}
    assert draft_tensors({"model.layers.0.mlp.up_proj.weight": KIND}) == frozenset()


def test_update_has_all_drafts_or_none() -> None:
    for model in (NEXTN, OWN):
        drafts = draft_tensors(model)
        check_whole(model, model)
        check_whole(model.keys() - drafts, model)
        with pytest.raises(BadCheckpoint, match=r"missing: send every tensor"):
            check_whole(model.keys() - {min(drafts)}, model)
        with pytest.raises(BadCheckpoint, match=r"up_proj.weight is missing"):
            check_whole(model.keys() - {"model.layers.0.mlp.up_proj.weight"}, model)


@pytest.mark.engine  # importing SGLang takes as long as an engine's start
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_update_without_drafts_keeps_them() -> None:
    """A draft of the same checkpoint is given its own tensors, where they are sent; one of another, nothing."""
    environment = {**os.environ, "SGLANG_PLATFORM": "polarnode_cpu"}
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    layer, mtp = ["model.layers.0.weight"], ["mtp.fc.weight"]
    assert {name: (each["ok"], each["kept"]) for name, each in found.items()} == {
        f"{kind} {sent}": (sent != "half", 2 if kind == "followed" else 1)
        for kind in ("followed", "external", "ngram")
        for sent in ("all", "target", "disk", "disk of the target", "half")
    }
    assert "model.layers.0.weight is missing" in found["external half"]["text"]
    assert found["followed all"]["target"] == [["begin"], layer + mtp, ["end"]]
    assert found["followed all"]["draft"] == [["begin"], mtp, ["end"]]
    assert found["followed target"]["draft"] == [["begin"], ["end"]]
    assert (found["followed disk"]["draft"], found["followed disk of the target"]["draft"]) == (
        [["disk"]],
        [],
    )
    for name, each in found.items():
        assert each["draft"] == [] or name.startswith("followed")
        assert each["target"]
