"""The model and its tokenizer in transformers: float32, its own forward pass, nothing of an engine."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Checkpoint:
    """What a folder says of ids and of text. What one sequence begins with as the one before it is not read
    again: prompts are long, and shared.
    """

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._read: list[int] = []
        self._cache: Any = None  # of all that was read

    @torch.no_grad()
    def logprobs(self, ids: list[int], places: list[int], temperatures: list[float]) -> list[float]:
        """The log-probability of the token at each place, of the logits over that place's temperature."""
        if not places:
            return []
        same = min(shared(self._read, ids), min(places) - 1)
        if not same:
            self._cache = DynamicCache()
        elif same < len(self._read):
            self._cache.crop(same - len(self._read))
        at = torch.tensor(places)
        logits = (
            self._model(torch.tensor([ids[same:]]), past_key_values=self._cache, logits_to_keep=at - 1 - same)
            .logits[0]
            .float()
        )
        self._read = ids
        own = torch.log_softmax(logits / torch.tensor(temperatures)[:, None], dim=-1)
        return [float(value) for value in own.gather(1, torch.tensor(ids)[at][:, None])[:, 0]]

    def text(self, ids: list[int]) -> str:
        """Control tokens as theirs: the most that a gateway of text could keep."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        asking: bool,
        thinking: bool | None,
    ) -> str:
        """The model's own chat template over a whole conversation; `asking` for the next turn."""
        options = {} if thinking is None else {"enable_thinking": thinking}
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=asking, **options
            )
        )


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next(
        (at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs),
        min(len(one), len(other)),
    )
