"""A random mixture of experts with transformers as its reference, and what an engine may tell of it: for the
CPU and the GPU tests.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes_engine import joined, order, sample

from polarnode.core.arrays import RoutedExperts
from polarnode.core.ports import Chunk
from polarnode.engine.engines import Engines

LAYERS, EXPERTS, TOP_K = 3, 8, 2


class Checkpoint:
    """A model on disk, and in transformers at float32."""

    def __init__(self, path: Path, model: Any, device: str = "cpu") -> None:
        self.path, self.model = path, model.float().eval().to(device)

    def rows(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> Any:
        """Log-probabilities of the whole vocabulary where each token was sampled."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *sampled]], device=self.model.device)).logits[
                0, len(prompt) - 1 : -1
            ]
        return torch.log_softmax(logits / temperature, dim=-1).cpu()

    def gates(self, tokens: Sequence[int]) -> list[Any]:
        """The router's logits of every layer: [positions, experts]."""
        import torch

        with torch.no_grad():
            told = self.model(
                torch.tensor([list(tokens)], device=self.model.device), output_router_logits=True
            ).router_logits
        return [layer.reshape(len(tokens), -1).cpu() for layer in told]


def make_mixture(path: Path, *, head_dim: int = 32, device: str = "cpu") -> Checkpoint:
    """Qwen3-MoE, so small that a start is all it costs; its router is sure of most of its choices."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, max_position_embeddings=65536,
        rope_theta=1e6, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # a fresh model is nearly uniform: any expert would do
                parameter.mul_(40 if name.endswith("mlp.gate.weight") else 4)
    model.save_pretrained(path)
    return Checkpoint(path, model, device)


def experts_of(chunks: Sequence[Chunk]) -> RoutedExperts:
    """They come with the last chunk alone."""
    rows = chunks[-1].routed
    assert rows is not None
    assert [chunk.routed for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (rows.layers, rows.top_k, rows.dtype) == (LAYERS, TOP_K, "uint8")
    return rows


def check_experts(mixture: Checkpoint, tokens: Sequence[int], rows: RoutedExperts, *, near: float) -> None:
    """Each layer's experts of each position, likeliest first, unless two of them are as good: logits closer
    than `near`.
    """
    import torch

    found = torch.frombuffer(bytearray(rows.data), dtype=torch.uint8).reshape(-1, LAYERS, TOP_K).long()
    assert (rows.start, rows.end) == (0, len(tokens) - 1)
    for layer, gates in enumerate(mixture.gates(tokens)):
        values, chosen = gates[:-1].topk(TOP_K + 1, dim=-1)
        clear = (values[:, :-1] - values[:, 1:]).min(dim=-1).values > near
        assert clear.float().mean() > 0.5
        assert torch.equal(found[clear, layer], chosen[clear, :TOP_K])


async def a_conversation_tells_each_position_once(
    engines: Engines, mixture: Checkpoint, *, near: float
) -> None:
    """An agent's turns: each prompt is the one before, its sample, and some more; each asks from where the
    one before ended.
    """
    prompt, told, start, whole = (
        [(7 * step) % 900 for step in range(60)],
        list[RoutedExperts](),
        0,
        list[int](),
    )
    for _ in range(3):
        chunks = await sample(engines, order(prompt, max_tokens=12, temperature=1.0, routed_from=start))
        told.append(experts_of(chunks))
        whole = [*prompt, *joined(chunks)]
        assert (told[-1].start, told[-1].end) == (start, len(whole) - 1)
        start, prompt = len(whole) - 1, [*whole, *range(len(whole), len(whole) + 25)]
    joint = RoutedExperts.joined(told, len(whole) - 1)
    assert joint is not None
    assert len(joint.data) == (len(whole) - 1) * LAYERS * TOP_K
    check_experts(mixture, whole, joint, near=near)
