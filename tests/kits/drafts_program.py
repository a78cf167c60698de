"""The keeper of weights in SGLang's own classes, with a target and a draft that write down what they are given:
a program of its own, because importing SGLang takes long and warns. JSON out: what each was given.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYER, MTP = "model.layers.0.weight", "mtp.fc.weight"


class Updater:
    """A runner's weight updater: its model has one tensor."""

    def __init__(self, torch: Any, path: str) -> None:
        self.given: list[list[str]] = []
        self.device, self.model_config = "cpu", SimpleNamespace(model_path=path)
        self.model = torch.nn.Linear(1, 1, bias=False)

    def get_model(self) -> Any:
        return self.model

    def begin_weight_update(self) -> None:
        self.given.append(["begin"])

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self.given.append(["end"])

    def load_weights_from_distributed(self, named: Any) -> tuple[bool, str]:
        self.given.append([name for name, _ in named])
        return True, ""

    def update_weights_from_disk(self, path: str, load_format: str | None) -> tuple[bool, str]:
        self.given.append(["disk"])
        return True, ""


def main() -> None:
    import torch
    from safetensors.torch import save_file

    from polarnode.engine.embedded.building import ensure_torchvision

    ensure_torchvision()
    from polarnode.engine.embedded import weights

    logging.disable()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
    )
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder, "whole"), Path(folder, "part")
        for path, names in ((whole, (LAYER, MTP)), (part, (LAYER,))):
            path.mkdir()
            (path / "config.json").write_text("{}")
            save_file({name: torch.ones(1, 1) for name in names}, str(path / "model.safetensors"))
        found = {
            f"{kind} {sent}": updated(torch, weights, kind, sent, whole, part)
            for kind in ("followed", "external", "ngram")
            for sent in ("all", "target", "disk", "disk of the target", "half")
        }
    json.dump(found, sys.stdout)


def updated(torch: Any, weights: Any, kind: str, sent: str, whole: Path, part: Path) -> Any:
    """What target and draft were given of an update, whether it was whole, and how many tensors were kept."""
    target, draft = Updater(torch, str(whole)), Updater(torch, str(whole))
    drafts = [] if kind == "ngram" else [("draft", SimpleNamespace(weight_updater=draft))]
    keeper = weights.Keeper.__new__(weights.Keeper)
    keeper.tp_worker = SimpleNamespace(
        weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=target))]
    )
    keeper.draft_worker = SimpleNamespace(weight_update_runners=lambda: drafts)
    keeper.tp_cpu_group = None
    own = {"followed": str(whole), "external": "/drafts/eagle3", "ngram": None}[kind]
    weights.get_spec = lambda: SimpleNamespace(speculative_draft_model_path=own)
    weights.get_model = lambda: SimpleNamespace(model_path=str(whole))
    weights.SchedulerWeightUpdaterManager.__post_init__ = lambda self: None
    keeper.__post_init__()
    ok, text = keeper._run_on_ranks(lambda: keeper._keep(1))
    assert ok, text
    kept = len(keeper.kept)
    one = torch.ones(1, 1)
    names = {"all": (LAYER, MTP), "target": (LAYER,), "half": (MTP,)}
    if sent in names:
        ok, text = keeper._run_on_ranks(lambda: keeper._load([(name, one) for name in names[sent]]))
    else:
        asked = SimpleNamespace(model_path=str(part if sent.endswith("target") else whole), load_format=None)
        found = keeper.update_weights_from_disk(asked)
        ok, text = found.success, found.message
    if ok:
        ok, text = keeper._run_on_ranks(keeper._check)
    return {"target": target.given, "draft": draft.given, "ok": ok, "text": text, "kept": kept}


if __name__ == "__main__":
    main()
