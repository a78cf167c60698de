"""A capture from its caller's side: the endpoint for an agent, and how it went.

The rule for whoever edits it: a capture is opened under a place of the caller's own naming, so that opening may be asked for again; and it is
ended whatever the agent did, because an open capture holds a place on the node.
"""

from collections.abc import Mapping
from secrets import token_hex
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from polarnode.client.commands import Request
from polarnode.client.requests import answered, part
from polarnode.conversation import Json
from polarnode.records import Outcome
from polarnode.tasks import CaptureEnd, CaptureSpec
from polarnode.wire import plain

MOST_REASON = 1000  # characters: a sentence for a table, not a traceback
LEAVING_S = 30.0  # for a node to be told of a fault: the fault itself goes on behind it
END_SILENCE_S = 120.0  # an end is answered when it is on disk, which the node itself waits for up to 30 s, after calls under way are ended


@frozen(kw_only=True)
class BaseUrls:
    """Where each provider's own client is pointed at. `any` serves all of them."""

    anthropic: str
    openai: str
    google: str
    any: str = ""


@frozen(kw_only=True)
class Opened:
    """A capture that is open."""

    session_id: str
    task_id: str
    group_id: str
    key: str = field(repr=False)
    base_urls: BaseUrls = field(repr=False)  # `any` has the key in its path
    env: Mapping[str, str] = field(factory=dict, repr=False)
    expires_s: float = 0.0
    sample_index: int = 0
    created: bool = True


@frozen(kw_only=True)
class Captured:
    """What became of a capture; its tokens are in its trajectory."""

    session_id: str
    outcome: Outcome
    reward: float | None
    turns: int
    traces: int
    sampled_tokens: int = 0
    trainable_tokens: int = 0


@define(eq=False, kw_only=True)
class CaptureSession:
    """An open capture, for the code that runs the agent: where its model is, and what it was worth.

    Set `reward` and the rest before the block ends; `result` is there behind it.
    """

    opened: Opened
    reward: float | None = None
    status: Literal["completed", "failed", "cancelled"] = "completed"
    exit_code: int | None = None
    reason: str | None = None
    metrics: dict[str, Json] = field(factory=dict)
    turn_rewards: dict[int, float] = field(factory=dict)
    lineage_rewards: dict[int, float] = field(factory=dict)
    result: Captured | None = field(default=None, init=False)

    @property
    def session_id(self) -> str:
        return self.opened.session_id

    @property
    def key(self) -> str:
        """What an agent's client sends as its API key."""
        return self.opened.key

    @property
    def openai_base_url(self) -> str:
        return self.opened.base_urls.openai

    @property
    def anthropic_base_url(self) -> str:
        return self.opened.base_urls.anthropic

    @property
    def google_base_url(self) -> str:
        return self.opened.base_urls.google

    @property
    def env(self) -> Mapping[str, str]:
        """For a harness that is a program: laid over its environment it finds its model by itself."""
        return self.opened.env

    def failed(self, error: BaseException) -> None:
        """The agent's code was left by `error`: a fault of its own, or an interruption of whoever ran it."""
        self.status = "failed" if isinstance(error, Exception) else "cancelled"
        self.reason = self.reason or f"{type(error).__name__}: {error}"[:MOST_REASON]

    def end(self) -> CaptureEnd:
        return CaptureEnd(
            status=self.status,
            exit_code=self.exit_code,
            reason=self.reason,
            reward=self.reward,
            metrics=self.metrics,
            turn_rewards={str(turn): reward for turn, reward in self.turn_rewards.items()},
            lineage_rewards={str(lineage): reward for lineage, reward in self.lineage_rewards.items()},
        )


def named(spec: CaptureSpec | None, **said: Any) -> CaptureSpec:
    """The capture that is asked for: `spec` with what else is said, under a task of its own where none is named."""
    whole = evolve(spec or CaptureSpec(), **{name: value for name, value in said.items() if value is not None})
    return whole if whole.task_id is not None else evolve(whole, task_id=f"capture-{token_hex(8)}")


def begin(spec: CaptureSpec) -> Request[Opened]:
    return answered(Opened, "POST", "/v1/capture", plain(spec))


def end(session_id: str, said: CaptureEnd) -> Request[Captured]:
    return answered(Captured, "DELETE", f"/v1/capture/{part(session_id)}", plain(said), silence_s=END_SILENCE_S)
