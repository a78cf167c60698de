"""A stand-in for a node that samples with whatever weights or adapter it was given, for the loops of trainers'
plug-ins.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from trainers_kit import group_of, make_turn, publish, session_without_rows

from polarnode.core.trajectory import Trajectory
from polarnode.groups import Group

SAMPLED = 6  # tokens of a turn


class StandIn:
    """A node: it loads a folder, tensors, or adapters, and its sessions are sampled by that model, or by the
    adapter that their task names.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.load, self.folder = AutoModelForCausalLM.from_pretrained, folder
        self.adapters: dict[str, tuple[Any, str]] = {}
        self.versions: list[str] = []  # of adapters
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, self.version = self.load(folder, dtype=torch.float32), "0"
        self.tasks: list[dict[str, Any]] = []
        self.sessions = 0

    def update_weights(self, version: str, *, path: Path, mode: str) -> None:
        self.model, self.version = self.load(path), version

    patience_s = 0.0

    def push_weights(self, version: str, named: Any, *, mode: str) -> None:
        self.model.load_state_dict({name: tensor.clone() for name, tensor in named.items()}, strict=False)
        self.version = version

    def send_adapter(self, name: str, version: str, body: bytes) -> None:
        """Read as peft reads it."""
        from peft import PeftModel  # type: ignore[import-not-found]

        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        with TemporaryDirectory() as folder:
            Path(folder, "adapter_model.safetensors").write_bytes(body)
            Path(folder, "adapter_config.json").write_text(header["__metadata__"]["adapter_config"])
            base = self.load(self.folder, dtype=torch.float32)
            self.adapters[name] = PeftModel.from_pretrained(base, folder).eval(), version
        self.versions.append(version)

    def groups(self, settings: Any, specs: Any) -> list[Group]:
        return [self.group(spec) for spec in specs]

    def group(self, spec: Any) -> Group:
        """The first session of each group is lost; the last has two rows."""
        used = {name: getattr(spec.sampling, name) for name in ("temperature", "top_p", "top_k")}
        used |= {"instruction": spec.instruction, "samples": spec.num_samples, "adapter": spec.adapter}
        self.tasks.append(used)
        self.sampler = self.adapters[spec.adapter] if spec.adapter else (self.model, self.version)
        self.temperature = spec.sampling.temperature
        count = spec.num_samples
        scored = [self.session(spec, number, several=number == count - 1) for number in range(1, count)]
        self.sessions += count
        lost = session_without_rows(status="interrupted", session_id=f"{self.sessions}-0")
        return group_of(*scored, lost=[lost])

    @torch.no_grad()
    def session(self, spec: Any, number: int, *, several: bool) -> Trajectory:
        prompt = self.tokenizer.encode(f"{spec.instruction} {number}")[:16]
        first = self.turn(0, None, prompt)
        second = self.turn(1, first, [5, 6])
        turns = [first, second]
        if several:
            turns.append(self.turn(2, None, [9, *prompt], lineage=1, role="subagent"))
        return publish(
            turns, sample_index=number, reward=number**2 / 9, session_id=f"{self.sessions}-{number}"
        )

    def turn(self, index: int, parent: Any, delta: list[int], **more: Any) -> Any:
        model, version = self.sampler
        before = [] if parent is None else [*self.row, *delta]
        self.row = before or list(delta)
        sampled, logprobs = [], []
        for _ in range(SAMPLED):
            chances = (
                model(torch.tensor([self.row])).logits[0, -1].float().div(self.temperature).log_softmax(-1)
            )
            token = int(torch.multinomial(chances.exp(), 1))
            sampled.append(token)
            logprobs.append(float(chances[token]))
            self.row.append(token)
        return make_turn(
            index, parent, delta, sampled, logprobs=logprobs, versions=[(version, SAMPLED)], **more
        )
