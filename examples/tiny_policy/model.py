"""The policy's shape, and how it is saved.

Large enough to copy and look up, small enough to ship in a wheel as float32 and to sample on a CPU.
"""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy.tokenizer import SPECIAL, VOCABULARY

CONTEXT = 65536
SHARPNESS = 1.5
END_OF_TEXT, _, TURN_END = range(VOCABULARY - 9, VOCABULARY - 9 + len(SPECIAL))


def config() -> Qwen3Config:
    """A Qwen3 in miniature."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        dtype="float32",
        use_cache=True,
        bos_token_id=None,
        eos_token_id=TURN_END,
        pad_token_id=END_OF_TEXT,
    )


def fresh(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    """The policy before training, initialised with three hints without which copying takes hours to form."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config())
    table = model.model.embed_tokens.weight.data
    table *= 5
    _relate_spellings(table, tokenizer)
    for layer in model.model.layers:
        _let_through(layer.self_attn.v_proj.weight.data, layer.self_attn.o_proj.weight.data)
        # Heads this narrow cannot pick one token out of a thousand while their norms are 1.
        layer.self_attn.q_norm.weight.data.fill_(SHARPNESS)
        layer.self_attn.k_norm.weight.data.fill_(SHARPNESS)
    return model


def _relate_spellings(table: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
    """Begin `kiwi`, ` kiwi` and `"kiwi` as one vector plus one for what stands before the word.

    Qwen3's split puts a sign before a word into the word's token.  Without this, copying a word from a
    sentence into JSON would have to be learned word by word.
    """
    texts = [tokenizer.decode([number]) for number in range(len(tokenizer))]
    numbers = {text: number for number, text in enumerate(texts)}
    start = table.clone()
    for number, text in enumerate(texts):
        if len(text) > 3 and not text[0].isalnum() and text[1:] in numbers:
            table[number] = start[numbers[text[1:]]] + 0.7 * start[numbers[text[0]]]


def _let_through(values: Tensor, output: Tensor, strength: float = 0.1) -> None:
    """Initialise every head to pass on what it attends to, so that only where to attend must be learned."""
    rows, _ = torch.linalg.qr(torch.randn(values.shape[1], values.shape[0]))
    values.copy_(rows.T)
    shared = output.shape[1] // values.shape[0]
    head = config().head_dim
    for column in range(0, output.shape[1], head):
        source = column // head // shared * head
        output[:, column : column + head] = values[source : source + head].T * (2 * strength / shared)


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write weights and configuration; engines that read older configurations find their keys too."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=[TURN_END, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(folder)
    target = folder / "config.json"
    settings = json.loads(target.read_text())
    settings |= {"torch_dtype": "float32", "rope_theta": 1_000_000.0}
    target.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
