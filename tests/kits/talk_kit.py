"""A node without waiting: the real readers, lineages, template, exchange and parser of one session, moved by
hand, sample by sample.

What `gateway/call.py` does between awaits is done here at once, in its order. Nothing is a double of our
code: only the engine is the test's, and gives what the test says, in whatever pieces.
"""

import json
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from attrs import define, field, frozen
from tokens_kit import Model, model

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import Answer, ModelRequest, Sampling
from polarnode.core.errors import EngineError, Refused
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn, VersionSpan
from polarnode.gateway import call
from polarnode.gateway.earlier_requests import SessionMemory
from polarnode.gateway.exchange import (
    Break,
    ChunkProduced,
    ClientLeft,
    CountRefusal,
    CutCall,
    EndStream,
    EngineFailed,
    Event,
    Exchange,
    ExchangeSettings,
    KeepResponse,
    RecordTurn,
    Render,
    RequestReceived,
    RequestRefused,
    Send,
    SessionEnded,
    StartGeneration,
)
from polarnode.gateway.model_requests import enforceable_request
from polarnode.gateway.sample import PromptRendered
from polarnode.merge.attach import Plan
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import CallExtras
from polarnode.providers.contract import Fault, ModelCallInfo, Reply, RequestEnvelope
from polarnode.providers.dialect import route

T = TypeVar("T")

SECRET = b"talk kit, thirty-two bytes, ok.."
CONTEXT = 60_000


def run_without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


@frozen(kw_only=True)
class Ask:
    """A request on the wire."""

    path: str
    body: Any
    headers: Mapping[str, str] = field(factory=dict)


@define(eq=False)
class CallInProgress:
    """One call under way. `sent` is what its client got, `ended` whether that is a whole answer, `fault` why
    there is none.
    """

    desk: "Desk"
    request: ModelRequest
    exchange: Exchange
    key: str
    sent: bytes = b""
    ended: bool = False
    refused: Fault | None = None
    orders: dict[int, GenerateOrder] = field(factory=dict)
    given: "dict[int, array[int]]" = field(factory=dict)
    spans: dict[int, list[VersionSpan]] = field(factory=dict)
    answers: tuple[Answer, ...] = ()
    broken: bool = False

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.exchange.plans

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @property
    def prompt(self) -> "array[int]":
        return self.orders[0].prompt

    @property
    def over(self) -> bool:
        return self.exchange.over

    def give(self, tokens: Sequence[int], finish: Any = None, *, choice: int = 0, version: str = "0") -> None:
        """The engine's next tokens of a choice, sampled by these weights. Logprobs are a function of place
        and token, none like another.
        """
        if self.exchange.ended(choice):
            return
        given = self.given.setdefault(choice, ids())
        start = len(given)
        given.extend(tokens)
        spans = self.spans.setdefault(choice, [])
        if tokens and spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=len(given))
        elif tokens:
            spans.append(VersionSpan(version=version, start=start, end=len(given)))
        chunk = Chunk(
            ids=ids(tokens),
            logprobs=logprobs_of(tokens, start, self.plans[choice].index),
            finish_reason=finish,
            version_spans=tuple(spans),
        )
        self.tell(ChunkProduced(chunk=chunk, at=self.desk.tick(), choice=choice))

    def leave(self) -> None:
        self.tell(ClientLeft(at=self.desk.tick()))

    def end_session(self) -> None:
        self.tell(SessionEnded(at=self.desk.tick()))

    def fail(self, choice: int = 0) -> None:
        self.tell(EngineFailed(error=EngineError("the host died"), at=self.desk.tick(), choice=choice))

    def tell(self, event: Event) -> None:
        for command in self.exchange.receive(event):
            self.obey(command)

    def obey(self, command: Any) -> None:
        match command:
            case Render():
                self.tell(self.desk.rendered(self.request, command))
            case StartGeneration(order=order, choice=choice):
                self.orders[choice] = order
                self.desk.asked(self.plans[choice], order)
            case RecordTurn(turn):
                self.desk.commit(turn)
            case CountRefusal(fault):
                self.refused = fault
            case KeepResponse(response):
                self.answers = response.answers
                if len(self.answers) == 1:
                    call = response.call(self.request)
                    self.exchange.settings.dialect.remember(call, self.answers[0], self.desk.memory)
            case Send(data=data):
                self.sent += data
            case Reply(body=body, status=status):
                self.sent, self.ended, self.broken = body, status == 200, status != 200
            case EndStream():  # Google's stream ends so too where its answer never came
                self.ended = bool(self.answers)
            case Break():
                self.broken = True
            case _:
                pass


def logprobs_of(tokens: Sequence[int], start: int, turn: int) -> "array[float]":
    """A logprob no other place of a session has, or hardly one: shifted by one it is another's."""
    return floats(
        -0.001 * (token % 512) - 0.01 * (start + place) - 10.0 * turn - 0.5
        for place, token in enumerate(tokens)
    )


@define(eq=False)
class Desk:
    """One session. `prompts` are what the engine was given, by turn; `turns` what was recorded, in the order
    of recording.
    """

    model: Model = field(factory=model)
    tokenizer: Any = None  # another view of the model's, for a test that watches it
    session_id: str = "s"
    sampling: Sampling = field(factory=Sampling)
    lineages: Lineages = field(init=False)
    served: call.Model = field(init=False)
    memory: SessionMemory = field(factory=SessionMemory, init=False)
    prompts: "dict[int, array[int]]" = field(factory=dict, init=False)
    turns: list[Turn] = field(factory=list, init=False)
    on_commit: Callable[[Turn], None] = field(default=lambda turn: None)
    _now: float = field(default=0.0, init=False)
    _calls: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.lineages = Lineages(session_id=self.session_id, secret=SECRET)
        tokenizer = self.tokenizer or self.model.tokenizer
        template = (
            self.model.template
            if self.tokenizer is None
            else type(self.model.template)(tokenizer, self.model.family)
        )
        self.served = call.Model(
            id="m",
            engine=None,
            template=template,
            tokenizer=tokenizer,
            family=self.model.family,
            context_length=CONTEXT,
            now=self.tick,
        )  # type: ignore[arg-type]

    def tick(self) -> float:
        self._now += 1.0
        return self._now

    def read(self, ask: Ask) -> ModelRequest:
        path, _, query = ask.path.partition("?")
        found = route("POST", path, ask.headers)
        assert found is not None
        envelope = RequestEnvelope(
            headers=ask.headers,
            model=found.model,
            stream=found.stream,
            operation=found.operation,
            query=query,
            memory=self.memory,
        )
        return enforceable_request(found.dialect.read(json.dumps(ask.body).encode(), envelope))

    def begin(self, ask: Ask, *, resume: int | None = None) -> CallInProgress:
        """A request up to its generation. `resume`: the cut turn whose answer goes on, as the model plane
        does for the same body.
        """
        request, key = self.read(ask), blake2b(json.dumps(ask.body).encode(), digest_size=16).hexdigest()
        asking = CallInProgress(self, request, self.exchange(ask, request, key), key)
        cut = None if resume is None else CutCall(resume)
        asking.tell(RequestReceived(at=self.tick(), wall=1000.0 + self._now, undelivered=cut))
        return asking

    def exchange(self, ask: Ask, request: ModelRequest, key: str) -> Exchange:
        found, references = route("POST", ask.path.partition("?")[0], ask.headers), self.lineages.references
        assert found is not None
        self._calls += 1
        settings = ExchangeSettings(
            session_id=self.session_id,
            dialect=found.dialect,
            call=ModelCallInfo(
                request=request, id=f"{self._calls:032x}", created=1_700_000_000, signature=""
            ),
            request_key=key,
            lineages=self.lineages,
            check_plan=lambda plan, conversation: None,
            extras=lambda parent: CallExtras(),
            sampling=self.sampling,
            context_length=CONTEXT,
            token_room=None,
            stop_ids=self.served.template.stop_ids,
            new_parser=lambda plan, prompt, stop: self.served.parser(
                prompt, stop, lambda k: references.call_id(plan.index, k), request.conversation.tools
            ),
            token_bytes=self.served.tokenizer.token_bytes,
        )
        return Exchange(settings)

    def rendered(self, request: ModelRequest, asked: Render) -> PromptRendered | RequestRefused:
        prompt = self.served.prompt(
            request.conversation, asked.plan.new, asked.history, threads=None, prefill=asked.prefill
        )
        try:
            return run_without_waiting(prompt)
        except Refused as error:
            return RequestRefused(error=error)

    def asked(self, plan: Plan, order: GenerateOrder) -> None:
        self.prompts[plan.index] = order.prompt

    def commit(self, turn: Turn) -> None:
        self.lineages.commit(turn)
        self.turns.append(turn)
        self.on_commit(turn)

    def say(
        self, ask: Ask, sample: Sequence[int], finish: str | None = None, *, pieces: Sequence[int] = ()
    ) -> CallInProgress:
        """Ask, sample, answer. `finish`: "stop" where the sample ends with a stop id, else "length"; `pieces`
        are the sizes of the first chunks.
        """
        asking = self.begin(ask)
        assert asking.orders, asking.refused
        rest = list(sample)
        for size in pieces:
            asking.give(rest[:size])
            rest = rest[size:]
        stopped = bool(sample) and sample[-1] in self.model.family.stop_ids
        asking.give(rest, finish or ("stop" if stopped else "length"))
        return asking

    def peek(self, ask: Ask) -> "tuple[Plan, array[int]]":
        """How a request would be planned and rendered, which nobody hears of."""
        request = self.read(ask)
        plan = self.lineages.plan(request.conversation, hints=request.hints)
        history = None if plan.parent is None else self.lineages.history(plan)
        try:
            rendered = self.rendered(request, Render(plan, history, plan.prefill))
            assert isinstance(rendered, PromptRendered), rendered
            return plan, rendered.prompt
        finally:
            self.lineages.abandon_plan(plan)

    def turn(self, index: int) -> Turn:
        return next(turn for turn in self.turns if turn.index == index)

    def controls(self, written: Sequence[int]) -> list[int]:
        marks = set(self.model.tokenizer.control.values())
        return [token for token in written if token in marks]

    def text(self, written: Sequence[int]) -> str:
        return b"".join(map(self.model.tokenizer.token_bytes, written)).decode(errors="replace")
