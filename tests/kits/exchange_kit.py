"""What the tests of the exchange share: a tokenizer of bytes, a scene that holds an exchange to a transcript,
and events.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, fields, frozen
from providers_kit import a_call

from polarnode.core.arrays import floats, ids
from polarnode.core.conversation import (
    Answer,
    Conversation,
    Json,
    Message,
    ModelRequest,
    Sampling,
    ToolCall,
    Usage,
)
from polarnode.core.ports import Chunk, GenerateOrder
from polarnode.core.trajectory import Turn, VersionSpan
from polarnode.gateway.exchange import (
    ChunkProduced,
    Command,
    CutCall,
    Event,
    Exchange,
    ExchangeSettings,
    RecordTurn,
    Render,
    RequestReceived,
    Send,
    StartGeneration,
    UndeliveredResponse,
)
from polarnode.gateway.sample import PromptRendered
from polarnode.merge.attach import Plan
from polarnode.merge.lineage import Lineages
from polarnode.merge.token_extras import CallExtras
from polarnode.providers.contract import (
    Dialect,
    Fault,
    Memory,
    ModelCallInfo,
    Reply,
    RequestEnvelope,
    ServedModel,
    StreamWriter,
)
from polarnode.providers.dialect import route
from polarnode.tokens.families import Family
from polarnode.tokens.parser import Parser

END, CALL, CALLED = 256, 257, 258
THINK, THOUGHT = 262, 263
BYTE_FAMILY = Family(
    name="bytes",
    turn_end=END,
    turn_ends=frozenset([END]),
    turn_starts=frozenset([259]),
    stop_ids=(END,),
    call_open=CALL,
    call_close=CALLED,
    think_open=THINK,
    think_close=THOUGHT,
)
REQUEST_ID = "ab" * 16


@frozen
class Bytes:
    """A tokenizer whose ids are bytes, and four marks."""

    vocab_size: int = 260
    control: Mapping[str, int] = field(factory=dict)

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]],
        generation_prompt: bool,
        thinking: object,
    ) -> str:
        raise NotImplementedError


def dialect(path: str) -> Dialect:
    found = route("POST", path, {})
    assert found is not None
    return found.dialect


CHAT, ANTHROPIC = dialect("/v1/chat/completions"), dialect("/v1/messages")


@define(eq=False)
class Lines:
    """A dialect in which every delta is a line: what a writer is told, as it is told it. `kept` is what it
    was to remember.
    """

    name: str = "lines"
    content_type: str = "text/plain"

    def read(self, body: bytes, envelope: RequestEnvelope) -> ModelRequest:
        raise NotImplementedError

    def whole(self, call: ModelCallInfo, answers: Sequence[Answer], usage: Usage) -> bytes:
        return b"".join(
            self.delta(delta, choice=choice)
            for choice, answer in enumerate(answers)
            for delta in answer.parts
        ) + self.end(answers, usage)

    def remember(self, call: ModelCallInfo, answer: Answer, memory: Memory) -> None:
        memory.keep(call.id, answer.text)

    def stream(self, call: ModelCallInfo) -> StreamWriter:
        return self

    def start(self, *, prompt_tokens: int, cached_tokens: int) -> bytes:
        return f"start {prompt_tokens} {cached_tokens}\n".encode()

    def delta(self, delta: Any, *, choice: int = 0) -> bytes:
        said = f"{delta.name}({delta.arguments})" if isinstance(delta, ToolCall) else delta.text
        return f"{choice}: {said}\n".encode()

    def keep_alive(self) -> bytes:
        return b"...\n"

    def end(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        reasons = " ".join(answer.finish_reason for answer in answers)
        return f"end {reasons} {usage.prompt_tokens}+{usage.completion_tokens}\n".encode()

    def failed(self, fault: Fault) -> bytes | None:
        return f"failed {fault.kind}\n".encode()

    def error(self, fault: Fault) -> Reply:
        return Reply(status=500, headers=(), body=fault.kind.encode())

    def count(self, tokens: int) -> bytes | None:
        return None

    def models(self, served: ServedModel) -> bytes:
        raise NotImplementedError

    def model(self, served: ServedModel, *, asked: str) -> bytes:
        raise NotImplementedError


LINES = Lines()
HI = Conversation(messages=(Message(role="user", text="hi"),))
NAMES = frozenset(name.name for name in fields(ModelRequest))


class ExchangeScene:
    """An exchange with its session's lineages; `play` holds it to a transcript. What is said of neither the
    terms nor the request is sampling.
    """

    def __init__(self, dialect: Dialect = CHAT, *, stream: bool = True, **said: Any) -> None:
        self.lineages = Lineages(session_id="s", secret=b"secret")
        self.dialect, self.stream, self.carry = dialect, stream, CallExtras()
        self.opens_thinking = said.pop("opens_thinking", False)
        settings = {"sampling": said.pop("task", Sampling()), "context_length": 100, "token_room": None}
        settings |= {name: said.pop(name) for name in ("context_length", "token_room") if name in said}
        self.asks = self.request(**said)
        self.settings = ExchangeSettings(
            session_id="s",
            dialect=dialect,
            call=evolve(a_call(), id=REQUEST_ID, request=self.asks),
            request_key="body",
            lineages=self.lineages,
            check_plan=lambda plan, conversation: None,
            extras=lambda parent: self.carry,
            stop_ids=BYTE_FAMILY.stop_ids,
            new_parser=self.parser,
            token_bytes=Bytes().token_bytes,
            **settings,
        )
        self.begin()

    def begin(
        self,
        undelivered: UndeliveredResponse | CutCall | None = None,
        *,
        conversation: Conversation | None = None,
        key: str = "body",
    ) -> None:
        """A call of the scene's request, up to the prompt it asks for."""
        call = self.settings.call
        if conversation is not None:
            call = evolve(call, request=evolve(call.request, conversation=conversation))
        self.settings = evolve(self.settings, call=call, request_key=key)
        self.exchange = Exchange(self.settings)
        (command,) = self.exchange.receive(RequestReceived(at=10.0, wall=1000.0, undelivered=undelivered))
        assert isinstance(command, Render)
        self.render = command

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.exchange.plans

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def parser(self, plan: Plan, prompt: Any, stop: tuple[str, ...]) -> Parser:
        return Parser(
            tokenizer=Bytes(),
            family=BYTE_FAMILY,
            call_id=lambda k: f"call_{plan.index}_{k}",
            opens_thinking=self.opens_thinking,
            stop=stop,
        )

    def request(self, **said: Any) -> ModelRequest:
        asked = {name: said.pop(name) for name in NAMES & said.keys()}
        return ModelRequest(
            **(
                {"provider": self.dialect.name, "model": "m", "conversation": HI, "stream": self.stream}
                | asked
            ),
            sampling=Sampling(**said),
        )

    def play(self, *steps: tuple[Event, list[Any]]) -> list[Command]:
        """Each event with what it must bring: a command, its class, or a predicate. Returns every command
        that came.
        """
        came: list[Command] = []
        for event, wanted in steps:
            commands = self.exchange.receive(event)
            assert len(commands) == len(wanted), f"{event}: {commands}"
            for command, want in zip(commands, wanted, strict=True):
                assert matches(command, want), f"{event}: {command} is not {want}"
            came += commands
        return came

    def to_generation(self, prompt: Sequence[int] = b"hi") -> list[Command]:
        return self.play((rendered(prompt), [StartGeneration] * len(self.plans)))

    def turn(self, commands: list[Command]) -> Turn:
        (turn,) = self.turns(commands)
        return turn

    def turns(self, commands: list[Command]) -> list[Turn]:
        found = [command.turn for command in commands if isinstance(command, RecordTurn)]
        for turn in found:
            self.lineages.commit(turn)  # InvariantViolated if it is not the turn that was planned
        return found


def matches(command: Command, want: Any) -> bool:
    if isinstance(want, type):
        return isinstance(command, want)
    return bool(want(command)) if callable(want) else command == want


def rendered(prompt: Sequence[int] = b"hi", close_length: int = 0) -> PromptRendered:
    return PromptRendered(prompt=ids(list(prompt)), delta=ids(list(prompt)), close_length=close_length)


def chunk(
    text: str,
    finish: Any = None,
    *,
    end: bool = False,
    start: int = 0,
    cached: int = 0,
    at: float = 11.0,
    choice: int = 0,
    **said: Any,
) -> ChunkProduced:
    return sampled(
        [*text.encode(), *([END] if end else [])],
        finish,
        start=start,
        cached=cached,
        at=at,
        choice=choice,
        **said,
    )


def sampled(
    tokens: Sequence[int],
    finish: Any = None,
    *,
    start: int = 0,
    cached: int = 0,
    at: float = 11.0,
    choice: int = 0,
    **said: Any,
) -> ChunkProduced:
    """Some ids; all of the sample so far under one version."""
    spans = (VersionSpan(version="v1", start=0, end=start + len(tokens)),) if start + len(tokens) else ()
    logprobs = floats(said.pop("logprobs", [-0.5] * len(tokens)))
    came = Chunk(
        ids=ids(tokens),
        logprobs=logprobs,
        finish_reason=finish,
        version_spans=spans,
        cached_tokens=cached,
        **said,
    )
    return ChunkProduced(chunk=came, at=at, choice=choice)


def data(commands: list[Command]) -> str:
    """All that was sent, or replied."""
    return b"".join(
        command.data if isinstance(command, Send) else command.body if isinstance(command, Reply) else b""
        for command in commands
    ).decode()


def says(*parts: str) -> Any:
    return lambda command: isinstance(command, Send) and all(part.encode() in command.data for part in parts)


def order(**sampling: Any) -> StartGeneration:
    return StartGeneration(
        GenerateOrder(
            request_id=REQUEST_ID,
            prompt=ids(list(b"hi")),
            sampling=Sampling(**sampling),
            stop_ids=(END,),
            affinity="s",
            chain="0",
        ),
    )
