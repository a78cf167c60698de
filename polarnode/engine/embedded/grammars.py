"""Sampling constrained by a JSON schema, a regular expression or a grammar, in an engine that knows only
token ids.

SGLang leaves its grammar backend out if it has no tokenizer (`skip_tokenizer_init`), and refuses constrained
requests. Here the backend gets the package's own tokenizer. It is loaded with the first constrained request
and on the backend's own thread, so that an engine without constraints pays nothing and no other request
waits. Constraints are compiled and tried in another process (`compiling`).

Two things differ from SGLang. Control tokens match no grammar: their text may stand in a JSON string, but as
a token it would open a tool call there. And a constraint may begin after a thought: `AFTER_KEY` among a
request's `custom_params` is the id that ends the thought. This runs in the scheduler's process, which any
exception raised here would end.
"""

import logging
import re
import threading
import time
from collections import OrderedDict
from http import HTTPStatus
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
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from sglang.srt.runtime_context import get_parallel, get_serving

from polarnode.engine.embedded.compiling import FairThreads, ForkedCompiler, NotStarted
from polarnode.engine.embedded.control import AFTER_KEY, LATE_GRAMMAR, SESSION, TOO_COSTLY
from polarnode.engine.embedded.grammar_process import STEP_S
from polarnode.tokens.tokenizer import LoadedTokenizer, load_tokenizer

# The number of compiled grammars that are kept: that of a schema takes up to a few MB at 150 000 tokens, and
# a session has few schemas.
KEPT = 128
# Blanks in a row between two parts of JSON: those of a line indented four deep. Without a bound a weak model
# writes nothing else.
MAX_BLANKS = 9


class LateGrammarManager(GrammarManager):  # type: ignore[misc]  # sglang is not typed
    """SGLang's manager, with a backend that is loaded when it is first needed."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        # It logs the whole text of what it refuses.
        logging.getLogger(XGrammarGrammarBackend.__module__).setLevel(logging.CRITICAL)
        self.grammar_backend: BaseGrammarBackend | None
        if self.grammar_backend is None and self.server_args.grammar_backend != "none":
            model = scheduler.model_config
            self.grammar_backend = LateBackend(
                Path(get_serving().tokenizer_path),
                vocab_size=model.vocab_size,
                stop_ids=frozenset(model.hf_eos_token_id or ()),
            )

        # This imports all that a scheduler needs, which other importers of this module lack.
        from sglang.srt.managers.io_struct import AbortReq

        polled = scheduler._poll_timeout_aborts
        scheduler._poll_timeout_aborts = lambda: [
            *polled(),
            *(AbortReq(rid=rid, abort_message=TOO_COSTLY) for rid in _slow_requests(scheduler)),
        ]

    def process_req_with_grammar(self, req: Any) -> bool:
        if isinstance(self.grammar_backend, LateBackend):
            self.grammar_backend.stop_ids |= frozenset(req.sampling_params.stop_token_ids or ())
            self.grammar_backend.executor.asking = (req.sampling_params.custom_params or {}).get(SESSION, "")
        return bool(super().process_req_with_grammar(req))

    def get_ready_grammar_requests(self) -> list[Any]:
        """The requests whose grammar is ready. SGLang ends on all ranks a request that one rank has waited
        for too long. The same happens to a grammar that was cut off, which may have been in time on another
        rank, and to one that the machine failed to compile, which is no fault of the text.
        """
        failed: list[tuple[Any, str]] = []
        for req in self.grammar_queue:
            error = getattr(req.grammar, "ended_by", None)
            if error is not None:
                req.grammar_wait_ct = self.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
            if isinstance(error, NotStarted):
                failed.append((req, str(error)))
        ready = list(super().get_ready_grammar_requests())
        for req, sentence in failed:
            req.set_finish_with_abort(sentence, HTTPStatus.SERVICE_UNAVAILABLE)
        return ready

    def _apply_request_reasoning_config(self, req: Any) -> None:
        """Set the id that ends a thought. SGLang's own method allows only ends that its reasoning parser
        knows.
        """
        after = (req.sampling_params.custom_params or {}).get(AFTER_KEY)
        if after is not None and isinstance(req.grammar, ReasonerGrammarObject):
            req.grammar.set_request_think_end_ids((after,))


class LateBackend(BaseGrammarBackend):  # type: ignore[misc]
    """xgrammar on our tokenizer. The latest `KEPT` compiled grammars are cached, because all of them would
    fill the memory.
    """

    def __init__(self, tokenizer: Path, *, vocab_size: int, stop_ids: frozenset[int]) -> None:
        super().__init__()
        self.executor = FairThreads()
        self.cache: OrderedDict[tuple[str, str], BaseGrammarObject] = OrderedDict()
        self.stop_ids = stop_ids
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._loaded: XGrammarGrammarBackend | None = None
        self._loading = threading.Lock()  # the first request loads the tokenizer for all

    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        """Cache a grammar, but not one that was late: it may have waited behind others of its session, and no
        other session pays for that.
        """
        if isinstance(value, InvalidGrammarObject) and value.error_message == LATE_GRAMMAR:
            return
        super().set_cache(key, value)
        while len(self.cache) > KEPT:
            self.cache.popitem(last=False)

    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> BaseGrammarObject:
        with self._loading:
            if self._loaded is None:
                tokenizer = load_tokenizer(self._tokenizer, vocab_size=self._vocab_size)
                self._loaded = _make_backend(tokenizer, self.stop_ids, self.executor)
        grammar = self._loaded._init_value_dispatch(key, require_reasoning)
        if isinstance(grammar, InvalidGrammarObject):
            return InvalidGrammarObject(plain(grammar.error_message))
        # Each request sets which id ends a thought.
        late = ReasonerGrammarObject(grammar=MeasuredGrammar.of(grammar), think_end_ids=(0,))
        late.maybe_init_reasoning(require_reasoning)
        return late


class MeasuredGrammar(XGrammarGrammar):  # type: ignore[misc]
    """Ends its request after a step of mask and parse that took too long, by the error with which SGLang ends
    one. The steps of an ambiguous grammar grow with the answer, in the loop that all sessions share.

    Ranks measure different times, and must end a request together. If there are several, the first alone
    decides, and its abort goes the way of SGLang's own timeouts, one step later.
    """

    spent = 0.0  # CPU seconds of the present step
    ends = True
    any_slow = False  # whether any grammar of this process was late since the first rank looked
    late = False  # a step took too long, and its request ends on all ranks

    @classmethod
    def of(cls, grammar: XGrammarGrammar) -> "MeasuredGrammar":
        found = cls(
            grammar.matcher,
            grammar.vocab_size,
            grammar.ctx,
            grammar.override_stop_tokens,
            grammar.key_string,
            grammar.grammar_stats,
        )
        parallel = get_parallel()
        found.ends = parallel.tp_size == 1 and parallel.pp_size == 1
        return found

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        began = time.thread_time()
        super().fill_vocab_mask(vocab_mask, idx)
        self.spent = time.thread_time() - began

    def accept_token(self, token: int) -> None:
        began = time.thread_time()
        if self.spent <= STEP_S or not self.ends:
            super().accept_token(token)
            self.spent += time.thread_time() - began
        if self.spent > STEP_S and self.ends:
            raise ValueError(TOO_COSTLY)
        if self.spent > STEP_S:
            self.late = MeasuredGrammar.any_slow = True
        self.spent = 0.0

    def copy(self) -> "MeasuredGrammar":
        return MeasuredGrammar.of(super().copy())


def _slow_requests(scheduler: Any) -> list[str]:
    """The running requests whose step took too long on this rank. They are ended on all ranks."""
    if not MeasuredGrammar.any_slow:
        return []
    MeasuredGrammar.any_slow = False
    return [
        req.rid
        for req in scheduler.collect_inflight_reqs()
        if not req.finished() and req.to_finish is None and _is_slow(req.grammar)
    ]


def _is_slow(grammar: Any) -> bool:
    inner = grammar.grammar if isinstance(grammar, ReasonerGrammarObject) else grammar
    return isinstance(inner, MeasuredGrammar) and inner.late


def _make_backend(
    tokenizer: LoadedTokenizer, stop_ids: frozenset[int], threads: FairThreads
) -> XGrammarGrammarBackend:
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
        _XgrammarTokenizer(info),
        vocab_size=tokenizer.vocab_size,
        any_whitespace=not serving.constrained_json_disable_any_whitespace,
        max_whitespace_cnt=serving.constrained_json_max_whitespace_cnt or MAX_BLANKS,
    )
    # Its cache has no bound, and ours has one.
    backend.grammar_compiler = ForkedCompiler(info, threads.others_wait)
    return backend


class _XgrammarTokenizer:
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
    byte that no UTF-8 text holds.
    """
    control = frozenset(tokenizer.control.values())
    return [
        b"\xff" if token in control or not (piece := tokenizer.token_bytes(token)) else piece
        for token in range(tokenizer.vocab_size)
    ]
