"""A tokenizer's vocabulary: its control tokens, the exact bytes of its tokens, and `tiktoken.model` files.

A control token is one that a text cannot become: it is in a prompt only where the template wrote it. Some
tokenizers also list ordinary text as added tokens (Gemma: runs of newlines, HTML tags). In case of doubt a
token counts as a control token, because then no client can write it.

Vocabularies spell bytes in two ways. Byte-level ones have a letter for each byte. SentencePiece's write
U+2581 for a space, and have a token `<0xAB>` for each byte that no other token spells. Every byte has a
token, so no client text is lost.

`tiktoken.model` (Kimi) has ranks of byte strings, and its pattern is in the checkpoint's own code. That code
is read and never run. What cannot be read with certainty is refused, because a wrong pattern would split
texts wrongly without any visible sign.
"""

import ast
import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from attrs import frozen
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from polarnode.core.errors import ModelError, boundary

# ── special tokens ────────────────────────────────────────────────────────────────────────────────


def ordinary(
    vocabulary: Mapping[str, int], added: Mapping[int, AddedToken], template: str
) -> dict[int, AddedToken]:
    """The added tokens that are ordinary text: they are in the vocabulary itself, and are neither marked
    special nor named by the template (which may name a newline).
    """
    return {
        number: token
        for number, token in added.items()
        if not token.special
        and vocabulary.get(token.content) == number
        and (token.content.isspace() or token.content not in template)
    }


def check_flags(control: Mapping[int, AddedToken], normalizer: Any, written: str) -> None:
    """Raise ModelError unless control strings mean exactly themselves in what a template writes, because
    otherwise a render could not be split on them.

    `written` is the template's source and what it renders. A flag of a token that never occurs there has no
    effect.
    """
    for token in control.values():
        swallows = token.lstrip or token.rstrip or token.single_word
        if (swallows and token.content in written) or (
            token.normalized and not _stays(token.content, normalizer)
        ):
            raise ModelError(
                f"its control token {token.content!r} swallows or changes text beside it: such tokenizers are"
                " not supported"
            )


def _stays(text: str, normalizer: Any) -> bool:
    return normalizer is None or normalizer.normalize_str(f"a{text}a") == f"a{text}a"


# ── bytes of tokens ───────────────────────────────────────────────────────────────────────────────

Kind = Literal["byte-level", "SentencePiece"]

SPACE: Final = "\u2581"  # SentencePiece writes this for a space
_BYTE_TOKENS: Final = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
_SPELLING_DECODER: Final = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
# removes the first space of a text, which the token contains
_STRIP_DECODER: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def kind_of(backend: Tokenizer) -> Kind:
    """How a tokenizer's vocabulary spells bytes, judged by its decoder. Raises ModelError for an unknown
    spelling.
    """
    decoder = {} if backend.decoder is None else state(backend.decoder)
    if decoder.get("type") == "ByteLevel":
        return "byte-level"
    parts = [part for part in decoder.get("decoders", ()) if part != _STRIP_DECODER]
    if parts == _SPELLING_DECODER and _falls_back(backend.model):
        return "SentencePiece"
    raise ModelError(
        "it is neither a byte-level one nor SentencePiece with byte fallback: its tokens' exact bytes are not"
        " known"
    )


def _falls_back(model: Any) -> bool:
    """Whether text that the model has no token for is spelled in byte tokens."""
    match model:
        case models.BPE():
            return bool(model.byte_fallback)
        case models.Unigram():
            return bool(state(model)["byte_fallback"])
        case _:
            return False


def spell(kind: Kind, vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of every token. Raises ModelError if a token spells no bytes or a byte has no token."""
    spelled = _byte_level_bytes(vocabulary) if kind == "byte-level" else _sentencepiece_bytes(vocabulary)
    covered = (
        set(spelled.values()) if kind == "byte-level" else {_BYTE_TOKENS.get(token) for token in vocabulary}
    )
    missing = [byte for byte in range(256) if bytes([byte]) not in covered]
    if missing:
        raise ModelError(f"it has no token for the byte 0x{missing[0]:02X}: texts that hold it would lose it")
    return spelled


def state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its JSON. The JSON of the whole tokenizer would be megabytes."""
    value: dict[str, Any] = json.loads(part.__getstate__())
    return value


def _byte_level_bytes(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    try:
        return {number: bytes(byte_of[letter] for letter in token) for token, number in vocabulary.items()}
    except KeyError as unknown:
        raise ModelError(
            f"its vocabulary holds the letter {unknown}, which stands for no byte: it is not a byte-level one"
        ) from unknown


def _sentencepiece_bytes(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    return {
        number: _BYTE_TOKENS.get(token) or token.replace(SPACE, " ").encode()
        for token, number in vocabulary.items()
    }


def byte_letters() -> dict[int, str]:
    """The letter of each byte in a byte-level vocabulary. Printable bytes stand for themselves; the others
    have the letters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


# ── tiktoken ranks ────────────────────────────────────────────────────────────────────────────────

RANKS_FILE: Final = "tiktoken.model"
_SAVE_REMEDY: Final = (
    "load it once with transformers (trust_remote_code=True) and save it as tokenizer.json into the folder"
)
# This is all that Kimi K2's own code does before the template.
_SORT_STATEMENT: Final = "tools = deep_sort_dict(tools)"
# The names that K2.5's code uses as well. It writes tools as TypeScript, which `typescript` does here.
_DECLARED_NAMES: Final = frozenset(
    ("tools", "tools_ts_str", "encode_tools_to_typescript_style", "kwargs", "Exception", "e", "print")
)


@frozen(kw_only=True)
class ConvertedRanks:
    """A converted tokenizer. `sorts_tools`: the checkpoint's code sorts the keys of tools before the template
    sees them.
    """

    tokenizer: Tokenizer
    config: dict[str, Any]
    sorts_tools: bool


def read_ranks(path: Path) -> ConvertedRanks:
    """The tokenizer of a folder with `tiktoken.model`. Raises ModelError if its code is not understood."""
    with boundary(ModelError, f"the tokenizer of {RANKS_FILE} cannot be read; {_SAVE_REMEDY}"):
        config = json.loads((path / "tokenizer_config.json").read_text())
        ranks = _parse_ranks((path / RANKS_FILE).read_bytes())
        code = ast.parse((path / _code_file(config)).read_text())
        added = {int(number): token["content"] for number, token in config["added_tokens_decoder"].items()}
    return ConvertedRanks(
        tokenizer=_converted(ranks, _pattern(code), added), config=config, sorts_tools=_sorts_tools(code)
    )


def _parse_ranks(text: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _code_file(config: dict[str, Any]) -> str:
    """The file of the module that `auto_map` names, as in `tokenization_kimi.TikTokenTokenizer`. It is beside
    the config.
    """
    module = config["auto_map"]["AutoTokenizer"][0].split(".")[0]
    if not module.isidentifier():
        raise ValueError(f"{module!r} is no module beside it")
    return f"{module}.py"


def _pattern(code: ast.Module) -> str:
    """The single pattern assigned to `pat_str`, written as a constant or as constants joined by `|`."""
    found = [
        node.value
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pat_str"
    ]
    match found:
        case [ast.Constant(value=str() as pattern)]:
            return pattern
        case [
            ast.Call(
                func=ast.Attribute(value=ast.Constant(value="|"), attr="join"), args=[ast.List(elts=parts)]
            )
        ]:
            pieces = [
                part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if len(pieces) == len(parts):
                return "|".join(pieces)
    raise ModelError(f"the pattern of {RANKS_FILE} cannot be read from the checkpoint's code; {_SAVE_REMEDY}")


def _sorts_tools(code: ast.Module) -> bool:
    """Whether the checkpoint's code sorts tools. Raises ModelError if it does anything else before a prompt
    is rendered.
    """
    functions = [
        node
        for node in ast.walk(code)
        if isinstance(node, ast.FunctionDef) and node.name == "apply_chat_template"
    ]
    if not functions:
        return False
    match functions:
        case [ast.FunctionDef(body=[first, *others, ast.Return(value=ast.Call(func=func))])]:
            spoken = {node.id for each in others for node in ast.walk(each) if isinstance(node, ast.Name)}
            renders = (
                ast.unparse(first) == _SORT_STATEMENT and ast.unparse(func) == "super().apply_chat_template"
            )
            if renders and spoken <= _DECLARED_NAMES:
                return True
    raise ModelError(
        "this checkpoint's own code makes its prompts (apply_chat_template), which is not run: its prompts"
        " would be others than the model's"
    )


def _converted(ranks: dict[bytes, int], pattern: str, added: dict[int, str]) -> Tokenizer:
    letters = byte_letters()
    lettered = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [(lettered[left], lettered[right]) for left, right in _all_merges(ranks)]
    tokenizer = Tokenizer(
        models.BPE({lettered[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The checkpoint's code names unlisted ids like this.
    names = [
        added.get(number, f"<|reserved_token_{number}|>") for number in range(len(ranks), max(added) + 1)
    ]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    _check_ids(tokenizer, added)
    return tokenizer


def _all_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every way to merge two tokens into one, in the order of the tokens, because tiktoken merges any two
    neighbours that form a token.
    """
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        yield from sorted(
            (pair for pair in halves if pair[0] in ranks and pair[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )


def _check_ids(tokenizer: Tokenizer, added: dict[int, str]) -> None:
    wrong = [name for number, name in added.items() if tokenizer.token_to_id(name) != number]
    if wrong:
        raise ModelError(
            f"the control token {wrong[0]!r} would get another id than the checkpoint gives it;"
            f" {_SAVE_REMEDY}"
        )
