"""A model's tokenizer and chat template, loaded from its folder. It implements `ports.Tokenizer`.

`plain` makes the tokenizer that encodes client text: the same model, normaliser and pre-tokeniser, without
control tokens, post-processor, truncation or padding. Only parts that are known to lose nothing are allowed,
by name. `TokenizationCache` keeps the ids of long texts, because the sessions of a group begin with the same
50 to 80 KB of system prompt and tools. Threads share it without a lock, so shared values are never changed,
only read, added whole or replaced whole.

Invariants: `encode_plain` never gives a control id. `token_bytes` are the exact bytes that the model sampled.
A tokenizer for which either fails is refused at load. tokenizer.json in the folder is authoritative, because
transformers' classes for single models change some tokenizers (DeepSeek's). transformers is slow to import,
so it is imported only when a tokenizer is loaded.
"""

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import define, field, frozen
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from polarnode.core.arrays import ids
from polarnode.core.conversation import Json
from polarnode.core.errors import ModelError, Refused, boundary
from polarnode.tokens.typescript import TYPESCRIPT_VARIABLE, typescript
from polarnode.tokens.vocabulary import (
    RANKS_FILE,
    SPACE,
    check_flags,
    kind_of,
    ordinary,
    read_ranks,
    spell,
    state,
)

# ── plain tokenizer ───────────────────────────────────────────────────────────────────────────────

_SPACE_REPLACEMENT: Final = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_LOSSLESS_CUTTERS: Final = frozenset(["Split", "ByteLevel", "Metaspace", "Digits", "Punctuation"])
# A Unigram model would find its byte tokens in a text that spells them, but such a text must remain that
# text.
_BYTE_TOKEN_START: Final = "<0x"
_PREFIX_FAULT: Final = (
    'it puts a space before every text, so what a client wrote would not come back: set "legacy": false and'
    ' "add_prefix_space": false in tokenizer_config.json, or write tokenizer.json again, if the model was'
    " trained so"
)


def plain(backend: Tokenizer, *, control: Iterable[str], text: Iterable[AddedToken]) -> Tokenizer:
    """A tokenizer with the vocabulary only. `text` are added tokens that are not control tokens; they are
    found as the model finds them.

    Raises ModelError if a part of the tokenizer changes or loses text, or looks up control tokens.
    """
    model, cutter = _model(backend.model, frozenset(control)), _plain_cutter(backend)
    if backend.normalizer is not None:
        _check_normalizer(state(backend.normalizer))
    return _made(model, backend.normalizer, cutter, text)


def plain_ascii_tokenizer(backend: Tokenizer, whole: Tokenizer, *, text: Iterable[AddedToken]) -> Tokenizer:
    """As `whole`, which `plain` returned, for ASCII texts. They have only one Unicode form, so NFC is left
    out, which takes an eighth of the time.
    """
    if backend.normalizer is None or not all(
        part["type"] == "NFC" for part in _parts(state(backend.normalizer), "normalizers")
    ):
        return whole
    return _made(whole.model, None, whole.pre_tokenizer, text)


def _made(model: Any, normalizer: Any, cutter: Any, text: Iterable[AddedToken]) -> Tokenizer:
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if cutter is not None:
        made.pre_tokenizer = cutter
    made.add_tokens(list(text))
    return made


def composes_text(backend: Tokenizer) -> bool:
    """Whether texts are composed (NFC) before the model sees them: the code points differ from those that the
    client sent, but a reader sees the same text.
    """
    return backend.normalizer is not None and any(
        part["type"] == "NFC" for part in _parts(state(backend.normalizer), "normalizers")
    )


def _model(model: Any, control: frozenset[str]) -> Any:
    match model:
        case models.BPE():
            if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
                raise ModelError(
                    "it encodes at random or marks the parts of words: its tokens are not the text's bytes"
                )
            return model
        case models.Unigram():
            return _hidden(state(model), control)
        case _:
            raise ModelError(
                f"its model is {type(model).__name__}, which can lose text: BPE and Unigram are supported"
            )


def _hidden(state: dict[str, Any], control: frozenset[str]) -> Any:
    """A Unigram model without its control tokens. The model looks every piece up, and a piece with a space in
    it is never found, because all spaces are U+2581 by then.
    """
    vocabulary = [(f" {piece}" if piece in control else piece, score) for piece, score in state["vocab"]]
    return models.Unigram(vocabulary, state["unk_id"], state["byte_fallback"])


def _check_normalizer(normalizer: dict[str, Any]) -> None:
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "Prepend":
            raise ModelError(_PREFIX_FAULT)
        if part["type"] != "NFC" and part != _SPACE_REPLACEMENT:
            raise ModelError(
                f"it changes texts before it encodes them ({part['type']}), so what a client wrote would not"
                " come back"
            )


def _plain_cutter(backend: Tokenizer) -> Any:
    config = None if backend.pre_tokenizer is None else state(backend.pre_tokenizer)
    parts = [] if config is None else [_kept(part) for part in _parts(config, "pretokenizers")]
    if isinstance(backend.model, models.Unigram):
        parts.insert(0, state(pre_tokenizers.Split(_BYTE_TOKEN_START, "isolated")))
    if not parts:
        return None
    # The library makes these parts only from the JSON of a whole tokenizer.
    empty = json.loads(Tokenizer(models.BPE()).to_str()) | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}
    }
    return Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def _kept(part: dict[str, Any]) -> dict[str, Any]:
    """A part that cuts text without loss. A prefix for the very first text is removed, because a prompt
    begins with a control token.
    """
    if part["type"] not in _LOSSLESS_CUTTERS or part.get("behavior") == "Removed":
        raise ModelError(
            f"it cuts texts in a way that may lose some of them ({part['type']}): such tokenizers are not"
            " supported"
        )
    if part.get("add_prefix_space") or part.get("prepend_scheme") == "always":
        raise ModelError(_PREFIX_FAULT)
    return part | {"prepend_scheme": "never"} if part["type"] == "Metaspace" else part


def _parts(config: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if config["type"] != "Sequence":
        yield config
        return
    for part in config[key]:
        yield from _parts(part, key)


# ── tokenization cache ────────────────────────────────────────────────────────────────────────────

# The length in letters from which a text is cached. Shorter texts are encoded in less than 0.2 ms, and there
# are too many of them.
MIN_CACHED_CHARS: Final = 1_000
# The limit on the bytes of cached texts and ids. The whole head of a harness takes 0.2 MB, so the heads of a
# hundred tasks fit, with room for long histories.
KEPT_BYTES: Final = 32 << 20


@define(eq=False)
class TokenizationCache:
    """Texts and their ids. The oldest are dropped first, in two generations: a text that is used again moves
    to the younger.
    """

    kept_bytes: int = KEPT_BYTES
    _young: "dict[str, array[int]]" = field(factory=dict, init=False)
    _old: "dict[str, array[int]]" = field(factory=dict, init=False)
    _young_bytes: int = field(default=0, init=False)

    def ids(self, text: str, encode: Callable[[str], Iterable[int]]) -> "array[int]":
        """The result of `encode` for a text, int32. The caller must not change it."""
        found = self._young.get(text)
        if found is not None:
            return found
        found = self._old.get(text)
        if found is None:
            found = ids(encode(text))
        self._keep(text, found)
        return found

    def _keep(self, text: str, found: "array[int]") -> None:
        size = sys.getsizeof(text) + sys.getsizeof(found)
        if 2 * size > self.kept_bytes:
            return
        if 2 * (self._young_bytes + size) > self.kept_bytes:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[text] = found
        self._young_bytes += size


# ── tokenizer ─────────────────────────────────────────────────────────────────────────────────────

# Letters, digits, an accent, a script without spaces, an emoji of four bytes, newlines, spaces at both ends,
# letters that compatibility forms would change, a tag and brackets. The text is normalised already (NFC).
_SAMPLE_TEXT: Final = (
    ' Plain text, caf\u00e9: 12 < 34\r\n\n\t{"a": [\u65e5\u672c, \U0001f642]}\u00a0\u00bd \uff21\ufb01 </p>  '
    " end "
)
_BYTE_NAME: Final = "<0x41>"  # the name of one of SentencePiece's byte tokens, as a client might write it
_PROBES: Final[tuple[tuple[dict[str, Json], ...], ...]] = (
    ({"role": "user", "content": "x"},),
    ({"role": "system", "content": "s"}, {"role": "user", "content": "x"}),
    (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ),
)


class _BytesById(dict[int, bytes]):
    """The bytes of each id."""

    def __init__(self, spelled: Mapping[int, bytes], vocab_size: int) -> None:
        super().__init__(spelled)
        self._vocab_size = vocab_size

    def __missing__(self, token: int) -> bytes:
        if 0 <= token < self._vocab_size:
            return b""
        raise ModelError(
            f"token {token} is outside this model's vocabulary of {self._vocab_size}: the engine serves"
            " another model than the tokenizer's"
        )


@frozen(eq=False, kw_only=True)
class LoadedTokenizer:
    """A tokenizer ready to serve. It is immutable and thread-safe. `kind` is for display.

    `token_bytes` gives the bytes of one id: the text of a control token, and nothing for an id that only pads
    the embedding. Raises ModelError for an id outside the vocabulary. It is called for each sampled token, so
    it is a dictionary's own look-up, which takes a fifth of a Python function's time.
    """

    vocab_size: int
    control: Mapping[str, int]
    kind: str
    _plain: Tokenizer
    _ascii: Tokenizer  # the same for ASCII texts
    token_bytes: Callable[[int], bytes]
    _chat: Any  # transformers has no types
    _sorts_tools: bool = False
    _typescript: bool = False  # whether its template wants tools as TypeScript

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text by the vocabulary alone; control strings are spelled out. This releases the GIL:
        100 KB take some 60 ms.
        """
        # Only the batch call releases the GIL. The single call would block the event loop for as long as it
        # encodes.
        tokenizer = self._ascii if text.isascii() else self._plain
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]],
        generation_prompt: bool,
        thinking: bool | None,
    ) -> str:
        """The text that the chat template renders. Raises Refused if the template itself refuses the
        conversation. With `thinking` None the template's default applies.
        """
        # DeepSeek V3.1 reads the second name.
        options = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        try:
            with boundary(ModelError, "the chat template fails on this conversation"):
                return self._render_template(messages, tools, generation_prompt, options)
        except ModelError as error:
            if isinstance(error.__cause__, TemplateError):
                raise Refused(
                    f"the model's chat template refuses this conversation: {error.__cause__}",
                    path="$.messages",
                ) from error
            raise

    def _render_template(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]],
        prompt: bool,
        options: Mapping[str, bool],
    ) -> str:
        shown: list[Any] = [_sorted(dict(tool)) for tool in tools] if self._sorts_tools else list(tools)
        written = typescript(shown) if self._typescript else None
        named = {} if written is None else {TYPESCRIPT_VARIABLE: written}
        return str(
            self._chat.apply_chat_template(
                list(messages),
                tools=shown or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **options,
                **named,
            )
        )


def load_tokenizer(path: Path, *, vocab_size: int | None = None) -> LoadedTokenizer:
    """The tokenizer in a model's folder. `vocab_size` is the number of rows of the model's embedding, if that
    is more than the ids that the tokenizer knows.

    Raises ModelError, with its remedy, for a folder without tokenizer or chat template, and for a tokenizer
    whose tokens could not be kept exactly.
    """
    if not path.is_dir():
        raise ModelError(
            f"there is no model folder at {path}: name a folder that holds tokenizer.json and a chat template"
        )
    chat, sorts_tools = _with_template(path)
    try:
        return _loaded(chat, vocab_size, sorts_tools=sorts_tools)
    except ModelError as error:
        raise ModelError(f"the tokenizer in {path} cannot be served: {error}") from error


def _with_template(path: Path) -> tuple[Any, bool]:
    """The tokenizer of transformers, which renders, and whether it must be given sorted tools."""
    from transformers import PreTrainedTokenizerFast

    if not (path / "tokenizer.json").is_file() and (path / RANKS_FILE).is_file():
        return _load_ranks(path, PreTrainedTokenizerFast)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"there is no tokenizer.json in {path}: load the tokenizer once with transformers and save it"
            " there (save_pretrained)"
        )
    with boundary(ModelError, f"the tokenizer in {path} cannot be loaded"):
        # The last argument prevents transformers' warning about a wrong pattern for folders without a
        # version.
        chat = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True, fix_mistral_regex=False)
    if not chat.chat_template:
        raise ModelError(
            f"the tokenizer in {path} has no chat template: put the model's chat_template.jinja into the"
            " folder"
        )
    return chat, False


def _load_ranks(path: Path, kind: Any) -> tuple[Any, bool]:
    """Load a checkpoint that has a tiktoken.model (Kimi). Its own code is not run."""
    ranked = read_ranks(path)
    template = path / "chat_template.jinja"
    source = template.read_text() if template.is_file() else ranked.config.get("chat_template")
    if not isinstance(source, str):
        raise ModelError(
            f"the tokenizer in {path} has no chat template: put the model's chat_template.jinja into the"
            " folder"
        )
    named = {
        name: ranked.config[name]
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if isinstance(ranked.config.get(name), str)
    }
    return kind(tokenizer_object=ranked.tokenizer, chat_template=source, **named), ranked.sorts_tools


def _loaded(chat: Any, vocab_size: int | None, *, sorts_tools: bool) -> LoadedTokenizer:
    backend: Tokenizer = chat.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    template = _template_text(chat.chat_template)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    text = ordinary(vocabulary, added, template)
    control = {number: token for number, token in added.items() if number not in text}
    kind = kind_of(backend)
    # Some vocabularies list their control tokens too.
    spelled = spell(kind, {token: number for token, number in vocabulary.items() if number not in control})
    spelled |= {number: token.content.encode() for number, token in control.items()}
    size = _vocab_size(vocab_size, spelled)
    whole = plain(backend, control=(token.content for token in control.values()), text=text.values())
    loaded = LoadedTokenizer(
        vocab_size=size,
        control=MappingProxyType({token.content: number for number, token in control.items()}),
        kind=(
            f"{kind} {type(backend.model).__name__}"
            f"{', shown composed (NFC)' if composes_text(backend) else ''}"
        ),
        plain=whole,
        ascii=plain_ascii_tokenizer(backend, whole, text=text.values()),
        token_bytes=_BytesById(spelled, size).__getitem__,
        chat=chat,
        # Kimi K2.5's code sorts the tools that it writes as TypeScript.
        sorts_tools=sorts_tools or TYPESCRIPT_VARIABLE in template,
        typescript=TYPESCRIPT_VARIABLE in template,
    )
    check_flags(control, backend.normalizer, template + "".join(_probed(loaded)))
    _check_plain(loaded, backend, control)
    return loaded


def _template_text(template: str | Mapping[str, str]) -> str:
    """The source of a chat template. Some models have one for tools beside the default."""
    return template if isinstance(template, str) else "".join(template.values())


def _probed(loaded: LoadedTokenizer) -> Iterator[str]:
    """The text that the template renders for each of a few conversations that it accepts."""
    for messages in _PROBES:
        try:
            yield loaded.render(messages, tools=(), generation_prompt=True, thinking=None)
        except (Refused, ModelError):
            continue


def _vocab_size(requested: int | None, spelled: Mapping[int, bytes]) -> int:
    spelled_size = max(spelled) + 1
    if requested is not None and requested < spelled_size:
        raise ModelError(
            f"it knows {spelled_size} ids and the model only {requested}: they do not belong together"
        )
    return requested or spelled_size


def _check_plain(loaded: LoadedTokenizer, backend: Tokenizer, control: Mapping[int, AddedToken]) -> None:
    """Check what this package relies on: plain ids are the model's own, bytes round-trip, and control strings
    remain text.
    """
    ids = loaded.encode_plain(_SAMPLE_TEXT)
    if (
        b"".join(map(loaded.token_bytes, [*ids, *loaded.encode_plain(_BYTE_NAME)]))
        != (_SAMPLE_TEXT + _BYTE_NAME).encode()
    ):
        raise ModelError("it does not give back the bytes of a text")
    marks = [
        token.content for token in control.values() if not (token.lstrip or token.rstrip or token.single_word)
    ][:1]
    whole = backend.encode(_SAMPLE_TEXT.join([*marks, *marks]) or _SAMPLE_TEXT, add_special_tokens=False).ids
    around = [loaded.control[mark] for mark in marks]
    if whole != [*around, *ids, *around]:
        raise ModelError(
            "it encodes a text by more than its vocabulary: what stands beside a text changes the text's"
            " tokens"
        )
    forbidden = set(loaded.control.values())
    for text in loaded.control:
        if forbidden.intersection(loaded.encode_plain(text)):
            raise ModelError(
                f"its vocabulary spells the control token {text!r} itself: a client's text could become one"
            )


def _sorted(value: Json) -> Json:
    """JSON with the keys of every object in order."""
    match value:
        case dict():
            return {key: _sorted(value[key]) for key in sorted(value)}
        case list():
            return [_sorted(item) for item in value]
        case _:
            return value


# ── two vocabularies ──────────────────────────────────────────────────────────

# The number of words by which a server's vocabulary is compared. Another tokenizer agrees on few of them.
WORDS = 64
SAMPLE_STRIDE = 97  # The distance between their ids, so that they are spread over merges of all ranks.
# The first ids, about which a server is asked first, are closer together.
LOW, LOW_STRIDE = 1000, 23


def vocabulary_sample(tokenizer: LoadedTokenizer) -> tuple[tuple[int, str], ...]:
    """Words of a tokenizer, spread over its ids. They are ASCII only, because a single id of another text may
    be half a character.
    """
    found = []
    low = min(LOW, tokenizer.vocab_size)
    for token in (*range(0, low, LOW_STRIDE), *range(low, tokenizer.vocab_size, SAMPLE_STRIDE)):
        text = tokenizer.token_bytes(token)
        if len(text) > 2 and text.isascii() and text.strip().isalnum():
            found.append((token, text.decode()))
    step = max(1, len(found) // WORDS)
    return tuple(word for place, word in enumerate(found) if word[0] < LOW or place % step == 0)


def vocabulary_difference(theirs: LoadedTokenizer, ours: LoadedTokenizer) -> str | None:
    """The first token of `ours` that is another one, or missing, in `theirs`. None if there is no such token.
    Ids that only pad an embedding are no tokens.
    """
    for token in range(ours.vocab_size):
        text = ours.token_bytes(token)
        found = theirs.token_bytes(token) if token < theirs.vocab_size else b""
        if text and text != found:
            return f"token {token} is {found!r} there and {text!r} here"
    return None
