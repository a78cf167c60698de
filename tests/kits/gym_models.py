"""NeMo Gym's models, as its documents tell them: what an agent server may answer, and what NeMo RL makes of
it.

Written anew after docs.nvidia.com/nemo/gym and its public source, for nemo-gym is on no index this machine
reaches. Fields only: whoever edits this keeps to what a reader of theirs refuses or trusts.
"""

from typing import Any, Literal

from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict, model_validator

TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class Item(BaseModel):
    """Any output item: its type is said, and token fields are there together or not at all."""

    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None
    generation_log_probs: list[float] | None = None
    routed_experts: str | list[list[list[int]]] | None = None

    @model_validator(mode="after")
    def whole(self) -> "Item":
        there = [getattr(self, name) is not None for name in TOKENS]
        if any(there) != all(there):
            raise ValueError("token fields are there together or not at all")
        return self


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(Item):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[Text]


class InputMessage(Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str


class Reasoning(Item):
    type: Literal["reasoning"]
    id: str
    summary: list[dict[Literal["type", "text"], str]]


class FunctionCall(Item):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed"]


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str


class GymResponse(Response):
    """A Responses object whose output may hold what the agent was told as well."""

    output: list[OutputMessage | InputMessage | Reasoning | FunctionCall | FunctionCallOutput]  # type: ignore[assignment]


class RunRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    responses_create_params: dict[str, Any]


class VerifyResponse(RunRequest):
    response: GymResponse
    reward: float
    mask_sample: bool = False
    instance_config: dict[str, Any] | None = None
    failure_kind: str | None = None
    failure_reason: str | None = None


class AggregateMetrics(BaseModel):
    model_config = ConfigDict(extra="forbid")
    group_level_metrics: list[dict[str, Any]]
    agent_metrics: dict[str, Any]
    key_metrics: dict[str, Any]


def masked_by_nemo_rl(full_result: dict[str, Any]) -> bool:
    """`_extract_mask_sample_flags` of NVIDIA-NeMo/RL, nemo_rl/experience/rollouts.py at 7ea279a."""
    return bool((full_result.get("instance_config") or {}).get("mask_sample", False))


def message_log(response: GymResponse) -> list[tuple[str, list[int]]]:
    """What NeMo RL trains: of each item with tokens what is new of its prompt, and what was generated; every
    prompt begins with all that was seen.
    """
    log: list[tuple[str, list[int]]] = []
    seen: list[int] = []
    for item in response.output:
        if item.prompt_token_ids is None or item.generation_token_ids is None:
            continue
        assert item.prompt_token_ids[: len(seen)] == seen, "a prompt that does not begin with what was seen"
        log += [("user", item.prompt_token_ids[len(seen) :]), ("assistant", item.generation_token_ids)]
        seen = item.prompt_token_ids + item.generation_token_ids
    return log
