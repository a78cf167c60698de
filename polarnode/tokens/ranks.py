"""A tokenizer from `tiktoken.model` (Kimi): ranks of byte strings, and a pattern that stands in the checkpoint's own code.

That code is read and never run: its pattern is a constant, and what it does to a prompt must be what is known here. Whoever edits this keeps
that: what can not be read with certainty is refused, because a wrong pattern cuts texts wrongly and nothing would show it.
"""

import ast
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from polarnode.errors import ModelError, boundary
from polarnode.tokens.spelling import byte_letters

RANKS: Final = "tiktoken.model"
_REMEDY: Final = "load it once with transformers (trust_remote_code=True) and save it as tokenizer.json into the folder"
_RENDERS: Final = "tools = deep_sort_dict(tools)"  # all that Kimi K2's own code does before the template


@frozen(kw_only=True)
class Ranked:
    """A converted tokenizer; `sorts_tools`: the checkpoint's code sorts the keys of tools before the template sees them."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    sorts_tools: bool


def read_ranks(path: Path) -> Ranked:
    """The tokenizer of a folder with `tiktoken.model`. ModelError for one whose code says what we do not understand."""
    with boundary(ModelError, f"the tokenizer of {RANKS} can not be read; {_REMEDY}"):
        config = json.loads((path / "tokenizer_config.json").read_text())
        ranks = _ranks((path / RANKS).read_bytes())
        code = ast.parse((path / _code_of(config)).read_text())
        added = {int(number): told["content"] for number, told in config["added_tokens_decoder"].items()}
    return Ranked(tokenizer=_converted(ranks, _pattern(code), added), config=config, sorts_tools=_sorts_tools(code))


def _ranks(text: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _code_of(config: dict[str, Any]) -> str:
    """The module that `auto_map` names, beside the config: `tokenization_kimi.TikTokenTokenizer`."""
    module = config["auto_map"]["AutoTokenizer"][0].split(".")[0]
    if not module.isidentifier():
        raise ValueError(f"{module!r} is no module beside it")
    return f"{module}.py"


def _pattern(code: ast.Module) -> str:
    """The one pattern assigned to `pat_str`, written as a constant or as constants joined by `|`."""
    found = [node.value for node in ast.walk(code) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pat_str"]
    match found:
        case [ast.Constant(value=str() as pattern)]:
            return pattern
        case [ast.Call(func=ast.Attribute(value=ast.Constant(value="|"), attr="join"), args=[ast.List(elts=parts)])]:
            pieces = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if len(pieces) == len(parts):
                return "|".join(pieces)
    raise ModelError(f"the pattern of {RANKS} can not be read from the checkpoint's code; {_REMEDY}")


def _sorts_tools(code: ast.Module) -> bool:
    """Whether its code sorts tools; ModelError where it does anything else before a prompt is rendered."""
    functions = [node for node in ast.walk(code) if isinstance(node, ast.FunctionDef) and node.name == "apply_chat_template"]
    if not functions:
        return False
    match functions:
        case [ast.FunctionDef(body=[first, ast.Return(value=ast.Call(func=func))])]:
            if ast.unparse(first) == _RENDERS and ast.unparse(func) == "super().apply_chat_template":
                return True
    raise ModelError(
        "this checkpoint's own code makes its prompts (apply_chat_template), which is not run: its prompts would be others than the model's"
    )


def _converted(ranks: dict[bytes, int], pattern: str, added: dict[int, str]) -> Tokenizer:
    letters = byte_letters()
    lettered = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [(lettered[left], lettered[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE({lettered[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = [added.get(number, f"<|reserved_token_{number}|>") for number in range(len(ranks), max(added) + 1)]  # as the checkpoint's code does
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    _check_ids(tokenizer, added)
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every way to make a token of two, in the tokens' order: tiktoken merges whatever two neighbours make one."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        yield from sorted((pair for pair in halves if pair[0] in ranks and pair[1] in ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _check_ids(tokenizer: Tokenizer, added: dict[int, str]) -> None:
    wrong = [name for number, name in added.items() if tokenizer.token_to_id(name) != number]
    if wrong:
        raise ModelError(f"the control token {wrong[0]!r} would get another id than the checkpoint gives it; {_REMEDY}")
