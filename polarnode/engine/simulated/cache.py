"""The cache and the clock of a simulated engine that has `kv_tokens`: `kv_model.py` under the requests of a
node.

Keys of the model are the tokens of whole pages themselves, because the tree has what stands before them. The
first key has a salt, the version of the weights and of the adapter, as in the real engine. Time is that of
the event loop, `speed` times as fast, and stands still during a pause.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from math import inf

from attrs import define, field

from polarnode.engine.kv_model import KvConstants, KvEvent, KvModel
from polarnode.engine.protocol import Simulation

# Sessions of which the latest prompt is remembered, in order to forget it: more than any engine has at once.
SESSIONS = 4096
RESERVED_TOKENS = 6  # tokens of the cache that SGLang gives no single request, so the node must not either
LEAST_S = 1e-6  # seconds of a step if the settings have none, because time has to pass


def constants(settings: Simulation) -> KvConstants:
    """The constants of the model, from the settings."""
    return KvConstants(
        capacity=settings.kv_tokens,
        page=settings.kv_page,
        prefill_tokens_per_s=settings.prefill_tokens_per_s or inf,
        past_tokens=settings.kv_past_tokens,
        step_s=max(LEAST_S, 1 / settings.tokens_per_s if settings.tokens_per_s else 0.0),
        request_s=settings.kv_request_s,
        context_s=settings.kv_context_s,
        chunk=settings.kv_chunk,
        most_running=settings.max_running,
    )


@define(eq=False)
class RequestProgress:
    """How far a request is. `sampled` of its `total` tokens are known, and `cached` tokens of its prompt were
    found.
    """

    rid: str
    session: str
    keys: Sequence[Hashable]
    total: int
    cached: int = 0
    sampled: int = 0
    over: bool = False


@define(eq=False)
class SimulatedCache:
    """Takes requests, and says how far they are at a time of the event loop (seconds)."""

    settings: Simulation
    _model: KvModel = field(init=False)
    _late: float = field(default=0.0, init=False)  # seconds of all pauses together
    _requests: dict[str, RequestProgress] = field(factory=dict, init=False)
    # The latest pages of each session.
    _known: dict[str, Sequence[Hashable]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._model = KvModel(constants(self.settings))

    def require(self, tokens: int) -> None:
        """Raise ValueError for a request that the cache can never hold."""
        if tokens > self.settings.kv_tokens - RESERVED_TOKENS:
            raise ValueError(
                f"{tokens} tokens of prompt and sample do not fit a cache of {self.settings.kv_tokens}: raise"
                " simulated.kv_tokens"
            )

    @property
    def running(self) -> int:
        return self._model.running

    @property
    def usage(self) -> float:
        """The share of the cache that requests hold. What could be evicted counts as free, as in SGLang."""
        return (self._model.used - self._model.evictable) / self.settings.kv_tokens

    def submit(
        self,
        rid: str,
        prompt: "array[int]",
        sample: "array[int]",
        *,
        max_new: int,
        salt: str,
        session: str,
        now: float,
    ) -> list[RequestProgress]:
        """Submit a request whose answer is known, and for which there is room. Returns what happened until
        then.
        """
        found = self.advance(now)
        # No keys and values are ever made of the last token of a sample.
        keys = self._keys(chain(prompt, sample[:-1]), salt)
        pages = len(prompt) // self.settings.kv_page
        self._model.submit(
            rid,
            keys[:pages],
            prompt=len(prompt),
            sample=len(sample),
            max_new=max_new,
            tail=keys[pages:],
            now=self._engine_s(now),
        )
        self._requests[rid] = RequestProgress(rid, session, keys, len(sample))
        return found

    def abort(self, rid: str) -> None:
        """End a request that was submitted."""
        if self._requests.pop(rid, None) is not None:
            self._model.abort(rid)

    def forget(self, session: str) -> None:
        """Let what is cached of a session and of no other be evicted first."""
        keys = self._known.pop(session, None)
        if keys is not None:
            self._model.forget(keys)

    def flush(self) -> None:
        """Drop what nobody reads."""
        self._model.flush()

    def due(self) -> float | None:
        """When something happens next. None if nothing happens before somebody asks."""
        at = self._model.next_time()
        return None if at is None else at / self.settings.speed + self._late

    def delay(self, seconds: float) -> None:
        """Nothing happened for so long."""
        self._late += seconds

    def advance(self, now: float) -> list[RequestProgress]:
        """Every request that has come further, in the order in which they were submitted."""
        for event in self._model.advance(self._engine_s(now)):
            self._happened(event)
        return list(self._moved())

    def _happened(self, event: KvEvent) -> None:
        request = self._requests[event.request]
        if event.kind == "began":
            request.cached = event.cached
        else:
            request.over = True

    def _moved(self) -> Iterator[RequestProgress]:
        for request in list(self._requests.values()):
            sampled = request.total if request.over else self._model.sampled(request.rid)
            if request.over:
                del self._requests[request.rid]
                self._remember_prompt(request)
            elif sampled <= request.sampled:  # less means that it was retracted, and will come to it again
                continue
            request.sampled = sampled
            yield request

    def _remember_prompt(self, request: RequestProgress) -> None:
        if request.session:
            self._known.pop(request.session, None)
            self._known[request.session] = request.keys
            if len(self._known) > SESSIONS:
                del self._known[next(iter(self._known))]

    def _keys(self, tokens: Iterator[int], salt: str) -> list[Hashable]:
        page, ids = self.settings.kv_page, array("i", tokens)
        keys: list[Hashable]
        if page == 1:
            keys = [*ids]
        else:
            data, size = ids.tobytes(), 4 * page
            keys = [data[start : start + size] for start in range(0, len(data) - size + 1, size)]
        if keys:
            keys[0] = (salt, keys[0])
        return keys

    def _engine_s(self, now: float) -> float:
        return (now - self._late) * self.settings.speed
