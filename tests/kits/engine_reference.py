"""A random checkpoint with transformers as its reference, and the ways to see what an engine leaves behind:
for the CPU and the GPU tests.
"""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from polarnode.core.ports import Chunk
from polarnode.core.trajectory import VersionSpan
from polarnode.engine.engines import Engines
from polarnode.engine.settings import EngineSettings
from polarnode.support.concurrency import group_members

CONTEXT = 8192
TOLERANCE = 2e-2  # nats, largest difference of one logprob: the project's own acceptance limit


class Reference:
    """A random checkpoint on disk, and the same weights in transformers at float32. `device` is torch's
    ("cpu", "cuda").
    """

    def __init__(self, path: Path, seed: int, *, device: str = "cpu", head_dim: int = 32) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
            max_position_embeddings=65536, rope_theta=1e6, tie_word_embeddings=True, eos_token_id=None,
        )  # fmt: skip
        self.path = path
        self.model = Qwen3ForCausalLM(config).float().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    # a fresh model is nearly uniform: every error of ours would hide in its ties
                    parameter.mul_(4)
        self.model.save_pretrained(path)
        self.model.to(device)

    def logprobs(
        self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        rows = self.rows(prompt, sampled, temperature)
        return [float(rows[place, token]) for place, token in enumerate(sampled)]

    def rows(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> Any:
        """Log-probabilities of the whole vocabulary where each token was sampled: float32[len(sampled),
        vocab_size].
        """
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *sampled]], device=self.model.device)).logits[
                0, len(prompt) - 1 : -1
            ]
        return torch.log_softmax(logits / temperature, dim=-1).cpu()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            found.append(int(self.rows(prompt, [*found, 0])[-1].argmax()))
        return found


def settings(reference: Reference, state_dir: Path, **more: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "model_path": reference.path,
            "device": "cpu",
            "state_dir": state_dir,
            "context_length": CONTEXT,
            **more,
        }
    )


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of our own, so that what is left in it is ours; short, because sockets live in
    there.
    """
    folder = Path(tempfile.mkdtemp(prefix="pn"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def shared_memory_of(host: int) -> set[Path]:
    """Every file in shared memory that a process of the host has mapped: semaphores, load files."""
    found = set()
    for pid in group_members(host):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return {Path(name) for name in found}


def is_nothing_left(temporary: Path, shared: set[Path]) -> bool:
    return list(temporary.iterdir()) == [] and not any(path.exists() for path in shared)


def scheduler_of(host: int) -> int:
    found = [pid for pid in group_members(host) if "scheduler" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(found) == 1
    return found[0]


def host_pid(engines: Engines) -> int:
    pid = engines.statistics().hosts[0].pid
    assert pid is not None
    return pid


def difference(chunks: Sequence[Chunk], theirs: Sequence[float], span: VersionSpan | None = None) -> float:
    """The largest difference of a logprob, in nats; of the tokens of a span only, where one is given."""
    ours = [logprob for chunk in chunks for logprob in chunk.logprobs]
    pairs = list(zip(ours, theirs, strict=True))
    return max(abs(one - other) for one, other in (pairs[span.start : span.end] if span else pairs))


PARENT = textwrap.dedent("""
    import sys, trio
    from pathlib import Path
    from polarnode.engine.engines import open_engines
    from polarnode.engine.settings import EngineSettings

    async def main():
        device, gpus = ("cuda", (0,)) if sys.argv[3:] else ("cpu", ())
        settings = EngineSettings(model_path=Path(sys.argv[1]), device=device, gpus=gpus, state_dir=Path(sys.argv[2]), context_length=8192)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            async with open_engines(settings) as engines:
                print("ready", flush=True)
                await trio.sleep_forever()

    async def tell():
        "The host's process id, as soon as there is one: this process's only child."
        import os
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        while not children.read_text().split():
            await trio.sleep(0.05)
        print("host", children.read_text().split()[0], flush=True)

    trio.run(main)
""")


def start_node_process(reference: Reference, tmp_path: Path, *more: str) -> "subprocess.Popen[str]":
    """A process of its own that opens engines; not trio's, because nothing but SIGKILL may end it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    arguments = [sys.executable, str(script), str(reference.path), str(tmp_path / "state"), *more]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
