"""A model's own tokenizer and chat template, loaded from its folder. Satisfies `ports.Tokenizer`.

Whoever edits this keeps three promises: `encode_plain` never gives a control id whatever the text holds; `token_bytes` are the exact bytes
the model sampled; what can not be kept for a tokenizer is refused while loading, never met while serving. The folder's tokenizer.json is the
truth: transformers' classes for single models make another tokenizer of some (DeepSeek's). transformers is slow to import, so it is imported
when a tokenizer is loaded and at no other time.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from polarnode.conversation import Json
from polarnode.errors import ModelError, Refused, boundary
from polarnode.tokens.added import check_flags, ordinary
from polarnode.tokens.plain import normalises, plain
from polarnode.tokens.ranks import RANKS, read_ranks
from polarnode.tokens.spelling import kind_of, spell

# Letters, digits, an accent, a script without spaces, an emoji of four bytes, newlines, spaces at both ends, letters that compatibility forms
# would change, a tag and brackets; normalised already (NFC).
_SAMPLE: Final = ' Plain text, caf\u00e9: 12 < 34\r\n\n\t{"a": [\u65e5\u672c, \U0001f642]}\u00a0\u00bd \uff21\ufb01 </p>   end '
_BYTE_NAME: Final = "<0x41>"  # one of SentencePiece's byte tokens, in a client's text
_PROBES: Final[tuple[tuple[dict[str, Json], ...], ...]] = (
    ({"role": "user", "content": "x"},),
    ({"role": "system", "content": "s"}, {"role": "user", "content": "x"}),
    ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}),
)


@frozen(eq=False, kw_only=True)
class LoadedTokenizer:
    """A tokenizer ready to serve; immutable, and safe to call from several threads at once. `kind` is for people."""

    vocab_size: int
    control: Mapping[str, int]
    kind: str
    _plain: Tokenizer
    _bytes: Mapping[int, bytes]
    _chat: Any  # transformers has no types
    _sorts_tools: bool = False

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text by the vocabulary alone, control strings spelled out. Lets other threads run: 100 KB take some 60 ms."""
        # Only the batch call releases the GIL; the single one would hold the event loop for as long as it encodes.
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id: a control token's are its text's, an id that only pads the embedding has none. ModelError outside the vocabulary."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        if 0 <= token < self.vocab_size:
            return b""
        raise ModelError(
            f"token {token} is outside this model's vocabulary of {self.vocab_size}: the engine serves another model than the tokenizer's"
        )

    def render(
        self, messages: Sequence[Mapping[str, Json]], *, tools: Sequence[Mapping[str, Json]], generation_prompt: bool, thinking: bool | None
    ) -> str:
        """The chat template's text. Refused where the template itself refuses the conversation; `thinking` None leaves the template's default."""
        options = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}  # DeepSeek V3.1 knows the second word
        try:
            with boundary(ModelError, "the chat template fails on this conversation"):
                return self._apply(messages, tools, generation_prompt, options)
        except ModelError as error:
            if isinstance(error.__cause__, TemplateError):
                raise Refused(f"the model's chat template refuses this conversation: {error.__cause__}", path="$.messages") from error
            raise

    def _apply(self, messages: Sequence[Mapping[str, Json]], tools: Sequence[Mapping[str, Json]], prompt: bool, options: Mapping[str, bool]) -> str:
        shown = [_sorted(dict(tool)) for tool in tools] if self._sorts_tools else list(tools)
        return str(self._chat.apply_chat_template(list(messages), tools=shown or None, tokenize=False, add_generation_prompt=prompt, **options))


def load_tokenizer(path: Path, *, vocab_size: int | None = None) -> LoadedTokenizer:
    """The tokenizer in a model's folder. `vocab_size`: rows of the model's embedding, when it has more than the tokenizer knows ids.

    ModelError, with its remedy, for a folder without tokenizer or chat template, and for one whose tokens we could not keep exactly.
    """
    if not path.is_dir():
        raise ModelError(f"there is no model folder at {path}: name a folder that holds tokenizer.json and a chat template")
    chat, sorts_tools = _with_template(path)
    try:
        return _loaded(chat, vocab_size, sorts_tools=sorts_tools)
    except ModelError as error:
        raise ModelError(f"the tokenizer in {path} can not be served: {error}") from error


def _with_template(path: Path) -> tuple[Any, bool]:
    """transformers' tokenizer, which renders, and whether it must be given sorted tools."""
    from transformers import PreTrainedTokenizerFast

    if not (path / "tokenizer.json").is_file() and (path / RANKS).is_file():
        return _of_ranks(path, PreTrainedTokenizerFast)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"there is no tokenizer.json in {path}: load the tokenizer once with transformers and save it there (save_pretrained)")
    with boundary(ModelError, f"the tokenizer in {path} can not be loaded"):
        # The last is said because transformers otherwise warns of a wrong pattern in whatever folder does not name its version.
        chat = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True, fix_mistral_regex=False)
    if not chat.chat_template:
        raise ModelError(f"the tokenizer in {path} has no chat template: put the model's chat_template.jinja into the folder")
    return chat, False


def _of_ranks(path: Path, kind: Any) -> tuple[Any, bool]:
    """A checkpoint that has a tiktoken.model (Kimi) and code of its own, which is not run."""
    ranked = read_ranks(path)
    template = path / "chat_template.jinja"
    told = template.read_text() if template.is_file() else ranked.config.get("chat_template")
    if not isinstance(told, str):
        raise ModelError(f"the tokenizer in {path} has no chat template: put the model's chat_template.jinja into the folder")
    named = {name: ranked.config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if isinstance(ranked.config.get(name), str)}
    return kind(tokenizer_object=ranked.tokenizer, chat_template=told, **named), ranked.sorts_tools


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
    loaded = LoadedTokenizer(
        vocab_size=_vocab_size(vocab_size, spelled),
        control=MappingProxyType({token.content: number for number, token in control.items()}),
        kind=f"{kind} {type(backend.model).__name__}{', shown composed (NFC)' if normalises(backend) else ''}",
        plain=plain(backend, control=(token.content for token in control.values()), text=text.values()),
        bytes=spelled,
        chat=chat,
        sorts_tools=sorts_tools,
    )
    check_flags(control, backend.normalizer, template + "".join(_probed(loaded)))
    _check_plain(loaded, backend, control)
    return loaded


def _template_text(template: str | Mapping[str, str]) -> str:
    """A chat template's source; some models have one for tools beside the default."""
    return template if isinstance(template, str) else "".join(template.values())


def _probed(loaded: LoadedTokenizer) -> Iterator[str]:
    """What the template writes for a few conversations, those that it takes."""
    for messages in _PROBES:
        try:
            yield loaded.render(messages, tools=(), generation_prompt=True, thinking=None)
        except (Refused, ModelError):
            continue


def _vocab_size(asked: int | None, spelled: Mapping[int, bytes]) -> int:
    known = max(spelled) + 1
    if asked is not None and asked < known:
        raise ModelError(f"it knows {known} ids and the model only {asked}: they do not belong together")
    return asked or known


def _check_plain(loaded: LoadedTokenizer, backend: Tokenizer, control: Mapping[int, AddedToken]) -> None:
    """Try what the rest of the room relies on, once: plain ids are the model's own, bytes come back, control strings stay text."""
    ids = loaded.encode_plain(_SAMPLE)
    if b"".join(map(loaded.token_bytes, [*ids, *loaded.encode_plain(_BYTE_NAME)])) != (_SAMPLE + _BYTE_NAME).encode():
        raise ModelError("it does not give back the bytes of a text")
    marks = [token.content for token in control.values() if not (token.lstrip or token.rstrip or token.single_word)][:1]
    whole = backend.encode(_SAMPLE.join([*marks, *marks]) or _SAMPLE, add_special_tokens=False).ids
    around = [loaded.control[mark] for mark in marks]
    if whole != [*around, *ids, *around]:
        raise ModelError("it encodes a text by more than its vocabulary: what stands beside a text changes the text's tokens")
    forbidden = set(loaded.control.values())
    for text in loaded.control:
        if forbidden.intersection(loaded.encode_plain(text)):
            raise ModelError(f"its vocabulary spells the control token {text!r} itself: a client's text could become one")


def _sorted(value: Json) -> Json:
    """JSON with the keys of every object in order."""
    match value:
        case dict():
            return {key: _sorted(value[key]) for key in sorted(value)}
        case list():
            return [_sorted(item) for item in value]
        case _:
            return value
