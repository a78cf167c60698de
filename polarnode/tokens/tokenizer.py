"""A model's own tokenizer and chat template, loaded from its folder. Satisfies `ports.Tokenizer`.

Whoever edits this keeps three promises: `encode_plain` never gives a control id whatever the text holds; `token_bytes` are the exact bytes
the model sampled; what can not be kept for a tokenizer is refused while loading, never met while serving. transformers is slow to import,
so it is imported when a tokenizer is loaded and at no other time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders

from polarnode.conversation import Json
from polarnode.errors import ModelError, Refused, boundary

# Letters, digits, an accent, a script without spaces, an emoji of four bytes, newlines and a bracket; normalised already (NFC).
_SAMPLE: Final = 'Plain text, caf\u00e9: 12 < 34\n\n\t{"a": [\u65e5\u672c, \U0001f642]}  end'


@frozen(eq=False, kw_only=True)
class LoadedTokenizer:
    """A tokenizer ready to serve; immutable, and safe to call from several threads at once."""

    vocab_size: int
    control: Mapping[str, int]
    _plain: Tokenizer
    _bytes: Mapping[int, bytes]
    _chat: Any  # transformers has no types

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
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            with boundary(ModelError, "the chat template fails on this conversation"):
                return self._apply(messages, tools, generation_prompt, options)
        except ModelError as error:
            if isinstance(error.__cause__, TemplateError):
                raise Refused(f"the model's chat template refuses this conversation: {error.__cause__}", path="$.messages") from error
            raise

    def _apply(self, messages: Sequence[Mapping[str, Json]], tools: Sequence[Mapping[str, Json]], prompt: bool, options: Mapping[str, bool]) -> str:
        return str(self._chat.apply_chat_template(list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt, **options))


def load_tokenizer(path: Path, *, vocab_size: int | None = None) -> LoadedTokenizer:
    """The tokenizer in a model's folder. `vocab_size`: rows of the model's embedding, when it has more than the tokenizer knows ids.

    ModelError, with its remedy, for a folder without a fast tokenizer or chat template, and for one whose tokens we could not keep exactly.
    """
    if not path.is_dir():
        raise ModelError(f"there is no model folder at {path}: name a folder that holds tokenizer.json and a chat template")
    chat = _transformers_tokenizer(path)
    backend: Tokenizer = chat.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    _check_added(added, path)
    spelled = _spelled(backend, added, path)
    loaded = LoadedTokenizer(
        vocab_size=_vocab_size(vocab_size, spelled, path),
        control=MappingProxyType({token.content: number for number, token in added.items()}),
        plain=_without_added_tokens(backend),
        bytes=spelled,
        chat=chat,
    )
    _check_plain(loaded, chat, path)
    return loaded


def _transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    with boundary(ModelError, f"the tokenizer in {path} can not be loaded"):
        chat = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not getattr(chat, "is_fast", False) or not isinstance(getattr(chat, "backend_tokenizer", None), Tokenizer):
        raise ModelError(f"the tokenizer in {path} is not a fast one: save it with transformers so that the folder holds tokenizer.json")
    if not chat.chat_template:
        raise ModelError(f"the tokenizer in {path} has no chat template: put the model's chat_template.jinja into the folder")
    return chat


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """The same vocabulary and merges (shared, not copied) without added tokens, post-processor, truncation or padding."""
    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _check_added(added: Mapping[int, AddedToken], path: Path) -> None:
    """Control strings must mean exactly themselves, or a render could not be split on them."""
    for token in added.values():
        if token.lstrip or token.rstrip or token.single_word or token.normalized:
            raise ModelError(f"the control token {token.content!r} in {path} swallows or changes text beside it: such tokenizers are not supported")


def _spelled(backend: Tokenizer, added: Mapping[int, AddedToken], path: Path) -> dict[int, bytes]:
    if not isinstance(backend.decoder, decoders.ByteLevel):
        raise ModelError(f"the tokenizer in {path} is not a byte-level one: its tokens' exact bytes are not known, and it can not be served")
    letters = _byte_letters()
    try:
        spelled = {number: bytes(letters[letter] for letter in token) for token, number in _vocabulary(backend, added).items()}
    except KeyError as unknown:
        raise ModelError(f"the vocabulary in {path} holds the letter {unknown}, which stands for no byte: it is not a byte-level one") from unknown
    return spelled | {number: token.content.encode() for number, token in added.items()}


def _vocabulary(backend: Tokenizer, added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Ordinary tokens; some tokenizers list their control tokens here too."""
    return {token: number for token, number in backend.get_vocab(with_added_tokens=False).items() if number not in added}


def _byte_letters() -> dict[str, int]:
    """Which letter of a byte-level vocabulary stands for which byte: printable ones for themselves, the others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _vocab_size(asked: int | None, spelled: Mapping[int, bytes], path: Path) -> int:
    known = max(spelled) + 1
    if asked is not None and asked < known:
        raise ModelError(f"the tokenizer in {path} knows {known} ids and the model only {asked}: they do not belong together")
    return asked or known


def _check_plain(loaded: LoadedTokenizer, chat: Any, path: Path) -> None:
    """Try what the rest of the room relies on, once: plain ids are the model's own, bytes come back, control strings stay text."""
    ids = loaded.encode_plain(_SAMPLE)
    if ids != chat.encode(_SAMPLE, add_special_tokens=False) or b"".join(map(loaded.token_bytes, ids)) != _SAMPLE.encode():
        raise ModelError(f"the tokenizer in {path} does not give back the bytes of a text, or encodes it by more than its vocabulary")
    forbidden = set(loaded.control.values())
    for text in loaded.control:
        if forbidden.intersection(loaded.encode_plain(text)):
            raise ModelError(f"the vocabulary in {path} spells the control token {text!r} itself: a client's text could become one")
