"""Sampling constrained by a JSON schema, a regular expression or a grammar, in an engine that knows only
token ids.

SGLang leaves its grammar backend out where it has no tokenizer (`skip_tokenizer_init`), and refuses
constrained requests. Here the backend gets the package's own tokenizer, loaded with the first constrained
request and on the backend's own thread, so that an engine without constraints pays nothing and no other
request waits.

Two things differ from SGLang. Control tokens match no grammar: their text may stand in a JSON string, but as
a token it would open a tool call there. And a constraint may begin after a thought: `AFTER` among a request's
`custom_params` is the id that ends it. This runs in the scheduler's process, which any exception raised here
would end.
"""

import logging
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xgrammar
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    InvalidGrammarObject,
)
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.runtime_context import get_serving

from polarnode.engine.embedded.control import AFTER
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer

# compiled grammars: a schema's takes up to a few MB at 150 000 tokens, and a session has few schemas
KEPT = 128
# blanks in a row between two parts of JSON: a line indented four deep; without a bound a weak model writes
# nothing else
WHITESPACE = 9
# a bounded string's characters in xgrammar's text of a schema, and those of JSON (RFC 8259, section 7)
LOOSE, STRICT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
THREADS = 2  # for compiling: more would take the cores of the harnesses


class Grammars(GrammarManager):  # type: ignore[misc]  # sglang is not typed
    """SGLang's manager, with a backend that loads itself when it is first needed."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        # it logs the whole text of what it refuses
        logging.getLogger(XGrammarGrammarBackend.__module__).setLevel(logging.CRITICAL)
        self.grammar_backend: BaseGrammarBackend | None
        if self.grammar_backend is None and self.server_args.grammar_backend != "none":
            model = scheduler.model_config
            self.grammar_backend = LateBackend(
                Path(get_serving().tokenizer_path),
                vocab_size=model.vocab_size,
                stop_ids=frozenset(model.hf_eos_token_id or ()),
            )

    def process_req_with_grammar(self, req: Any) -> bool:
        if isinstance(self.grammar_backend, LateBackend):
            self.grammar_backend.stop_ids |= frozenset(req.sampling_params.stop_token_ids or ())
        return bool(super().process_req_with_grammar(req))

    def _apply_request_reasoning_config(self, req: Any) -> None:
        """SGLang's own allows only ends of thoughts that its reasoning parser knows."""
        after = (req.sampling_params.custom_params or {}).get(AFTER)
        if after is not None and isinstance(req.grammar, ReasonerGrammarObject):
            req.grammar.set_request_think_end_ids((after,))


class LateBackend(BaseGrammarBackend):  # type: ignore[misc]
    """xgrammar on our tokenizer. The latest `KEPT` compiled grammars are cached: all of them would fill the
    memory.
    """

    def __init__(self, tokenizer: Path, *, vocab_size: int, stop_ids: frozenset[int]) -> None:
        super().__init__()
        # one at a time: the first loads the tokenizer for all
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.cache: OrderedDict[tuple[str, str], BaseGrammarObject] = OrderedDict()
        self.stop_ids = stop_ids
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._loaded: XGrammarGrammarBackend | None = None

    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        super().set_cache(key, value)
        while len(self.cache) > KEPT:
            self.cache.popitem(last=False)

    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> BaseGrammarObject:
        if self._loaded is None:
            self._loaded = _backend(
                load_tokenizer(self._tokenizer, vocab_size=self._vocab_size), self.stop_ids
            )
        grammar = self._loaded._init_value_dispatch(key, require_reasoning)
        if isinstance(grammar, InvalidGrammarObject):
            return InvalidGrammarObject(plain(grammar.error_message))
        # which id ends a thought is set by each request
        late = ReasonerGrammarObject(grammar=grammar, think_end_ids=(0,))
        late.maybe_init_reasoning(require_reasoning)
        return late


def _backend(tokenizer: LoadedTokenizer, stop_ids: frozenset[int]) -> XGrammarGrammarBackend:
    """SGLang's xgrammar backend over our vocabulary. SGLang's own needs transformers' tokenizer, and treats
    control tokens as text.
    """
    info = xgrammar.TokenizerInfo(
        spelled(tokenizer),
        xgrammar.VocabType.RAW,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=sorted(stop_ids),
    )
    serving = get_serving()
    backend = XGrammarGrammarBackend(
        _Ready(info),
        vocab_size=tokenizer.vocab_size,
        any_whitespace=not serving.constrained_json_disable_any_whitespace,
        max_whitespace_cnt=serving.constrained_json_max_whitespace_cnt or WHITESPACE,
    )
    # its cache has no bound, ours has
    backend.grammar_compiler = StrictStrings(info, max_threads=THREADS, cache_enabled=False)
    return backend


class StrictStrings(xgrammar.GrammarCompiler):
    """xgrammar 0.2.7 lets a string with `minLength` or `maxLength` hold raw control characters, which JSON
    does not. In the grammar's text, their class of characters becomes that of any other string.
    """

    def compile_json_schema(self, *schema: Any, **more: Any) -> xgrammar.CompiledGrammar:
        grammar = xgrammar.Grammar.from_json_schema(*schema, **more)
        text = str(grammar)
        if LOOSE in text:
            grammar = xgrammar.Grammar.from_ebnf(text.replace(LOOSE, STRICT))
        return self.compile_grammar(grammar)


class _Ready:
    """The part of a self-describing tokenizer that SGLang's backend uses."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self._info = info

    def init_xgrammar(self) -> tuple[xgrammar.TokenizerInfo, None]:
        return self._info, None


def plain(complaint: str) -> str:
    """The part of xgrammar's error that helps a grammar's author, without the time of day and the C++
    line.
    """
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", complaint).strip()


def spelled(tokenizer: LoadedTokenizer) -> list[bytes]:
    """Each id's bytes as a grammar may match them. Control tokens and ids that only pad the embedding get a
    byte no UTF-8 text holds.
    """
    control = frozenset(tokenizer.control.values())
    return [
        b"\xff" if token in control or not (piece := tokenizer.token_bytes(token)) else piece
        for token in range(tokenizer.vocab_size)
    ]
