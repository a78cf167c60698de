"""What can be known of weights without loading them: heads of safetensors files, what differs from a model,
what changed since.
"""

import json
from pathlib import Path

import pytest
from attrs import define, field

from polarnode.core.errors import EngineError
from polarnode.engine.checkpoints import (
    BadCheckpoint,
    Kind,
    check_folder,
    check_tensors,
    check_whole,
    fingerprint,
    manifest,
)
from polarnode.engine.host import Loaded, StaleWeights, load_target
from polarnode.engine.host_process import PendingReplies
from polarnode.engine.protocol import (
    BeginUpdate,
    CheckUpdate,
    CommitUpdate,
    Done,
    LoadDisk,
    LoadTensors,
    RollBack,
    ToHost,
)
from polarnode.engine.simulated.serving import SimulatedWeights
from polarnode.node.config import TINY_MODEL

MODEL = {"a": Kind((2, 3), "BF16"), "b": Kind((4,), "F32"), "q": Kind((4,), "F8_E4M3")}


def written(folder: Path, tensors: dict[str, tuple[list[int], str]], *, missing: int = 0) -> Path:
    """A checkpoint of zeros; `missing` bytes short."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    size = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}
    head, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, dtype) in tensors.items():
        count = size[dtype]
        for each in shape:
            count *= each
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}  # type: ignore[dict-item]
        end += count
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end - missing))
    return folder


WHOLE: dict[str, tuple[list[int], str]] = {"a": ([2, 3], "F16"), "b": ([4], "BF16"), "q": ([4], "F8_E4M3")}


def test_checkpoint_lists_its_tensors(tmp_path: Path) -> None:
    assert manifest(written(tmp_path / "one", WHOLE)) == {
        "a": Kind((2, 3), "F16"),
        "b": Kind((4,), "BF16"),
        "q": Kind((4,), "F8_E4M3"),
    }
    assert manifest(tmp_path) == {}
    assert len(manifest(TINY_MODEL)) > 10
    check_folder(tmp_path / "one", MODEL)
    check_folder(TINY_MODEL, manifest(TINY_MODEL))


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (WHOLE | {"c": ([1], "F32")}, "c is not in the model"),
        (WHOLE | {name: ([1], "F32") for name in "cdef"}, "c, d, e and 1 more are not in the model"),
        (WHOLE | {"a": ([3, 2], "BF16")}, "a has shape [3, 2], the model's has [2, 3]"),
        (WHOLE | {"q": ([4], "F32")}, "q is F32, the model's is F8_E4M3"),
        ({"a": ([2, 3], "F16")}, "b, q are missing: send every tensor of the model"),
    ],
)
def test_different_model_is_refused(
    tmp_path: Path, tensors: dict[str, tuple[list[int], str]], sentence: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        check_folder(written(tmp_path / "one", tensors), MODEL)
    assert str(caught.value) == sentence


def test_tied_head_may_be_present(tmp_path: Path) -> None:
    check_tensors({"lm_head.weight": Kind((9, 9), "F32")}, MODEL)
    check_whole([*MODEL, "lm_head.weight"], MODEL)


def test_invalid_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        check_folder(tmp_path, {})
    with pytest.raises(BadCheckpoint, match="is cut: it has"):
        check_folder(written(tmp_path / "cut", WHOLE, missing=1), MODEL)
    (tmp_path / "cut/model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadCheckpoint, match="is no safetensors file"):
        manifest(tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").write_bytes((9).to_bytes(8, "little") + b"{no json}")
    with pytest.raises(BadCheckpoint, match="is no whole safetensors file"):
        manifest(tmp_path / "cut")


def test_fingerprint_changes_with_files(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", WHOLE)
    before = fingerprint(folder)
    assert before == fingerprint(folder) != ""
    (folder / "config.json").write_text("{ }")
    assert fingerprint(folder) != before
    assert fingerprint(tmp_path / "nothing") == ""


def test_simulated_host_refuses_like_real(tmp_path: Path) -> None:
    updates = SimulatedWeights(version="0", model=MODEL)
    assert updates.obey(RollBack(call=1)) == (False, "no old weights are kept to roll back to")
    assert updates.obey(BeginUpdate(call=1, ranks=2)) == (True, "")
    assert updates.obey(CheckUpdate(call=2, flush=True)) == (
        False,
        "nothing was sent: send every tensor of the model",
    )
    assert not updates.obey(LoadDisk(call=3, path=str(tmp_path)))[0]
    inner = tmp_path / "inner"
    (inner / "model.safetensors").mkdir(parents=True)
    (inner / "config.json").write_text("{}")
    assert updates.obey(LoadDisk(call=3, path=str(inner))) == (
        False,
        "model.safetensors is no regular file: write weights as files, not as folders, pipes or devices",
    )
    assert updates.obey(LoadTensors(call=4, payloads=[b"\x80"])) == (True, "")
    assert updates.obey(CheckUpdate(call=5, flush=True)) == (True, "")
    assert updates.obey(CommitUpdate(call=6, version="1")) == (True, "")
    assert updates.version == "1"


# ── a host that comes back ────────────────────────────────────────────────────


@define(eq=False)
class Asked:
    """Answers every order, and may want something else meanwhile."""

    wanted: Loaded | None
    then: Loaded | None = None
    ok: bool = True
    said: list[ToHost] = field(factory=list)

    async def ask(self, make: object) -> Done:
        order = make(1)  # type: ignore[operator]
        self.said.append(order)
        if self.then is not None and isinstance(order, CommitUpdate):
            self.wanted, self.then = self.then, None
        return Done(call=1, ok=self.ok, message="it said no")


async def test_idle_host_loads_wanted_weights() -> None:
    asked = Asked(Loaded(version="1", path="/one"), then=Loaded(version="2", path="/two"))
    assert await load_target(lambda: asked.wanted, asked.ask) == Loaded(version="2", path="/two")
    assert asked.said == [
        LoadDisk(call=1, path="/one"),
        CommitUpdate(call=1, version="1"),
        LoadDisk(call=1, path="/two"),
        CommitUpdate(call=1, version="2"),
    ]
    assert await load_target(lambda: None, asked.ask) is None


async def test_unloadable_weights_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", WHOLE)
    for wanted, kind in (
        (Loaded(version="1"), StaleWeights),
        (Loaded(version="1", path=str(folder), files="other"), StaleWeights),
        (Loaded(version="1", path=str(folder), files=fingerprint(folder)), EngineError),
    ):
        asked = Asked(wanted, ok=False)
        with pytest.raises(kind) as caught:
            await load_target(lambda wanted=wanted: wanted, asked.ask)  # type: ignore[misc]
        assert isinstance(caught.value, StaleWeights) is (kind is StaleWeights)


async def test_unawaited_answers_are_dropped() -> None:
    replies = PendingReplies()
    replies.answer(Done(call=7, ok=True))
    died = await replies.ask(lambda call: CheckUpdate(call=call, flush=True), lambda _: replies.fail("died"))
    assert died == Done(call=0, ok=False, message="died")
    said = Done(call=1, ok=True)
    assert (
        await replies.ask(lambda call: CheckUpdate(call=call, flush=True), lambda _: replies.answer(said))
        is said
    )
