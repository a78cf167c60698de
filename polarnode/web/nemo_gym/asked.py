"""What Gym asks of an agent server: the parameters of a Responses call and, around them, a row of its dataset.

The rule for whoever edits it: what a harness can not be given (tools of the environment, a conversation that has begun) is refused with its
path. Left out silently it would be a reward for another task.
"""

import re
from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.wire import structure

# Gym's own word for one rollout, unique to it, and the indices that a collector counts in, which begin anew with each collection.
ROLLOUT_ID: Final = "_ng_rollout_id"
ATTEMPT: Final = "_ng_attempt_index"
INDICES: Final = ("_ng_task_index", "_ng_rollout_index", ATTEMPT)
ROLLOUT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PROMPTING: Final = ("user", "system", "developer")  # roles an instruction may be made of


@frozen(kw_only=True)
class CreateParams:
    """`responses_create_params`, as far as an agent that is no model reads them; the rest (`store`, `include`, `user` …) means nothing to it."""

    input: str | tuple[dict[str, Json], ...]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: tuple[Json, ...] = ()
    tool_choice: Json = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    model: str | None = None


@frozen(kw_only=True)
class Asked:
    """One rollout that is asked for. `row` is the whole body of `/run`; None where `/v1/responses` was called, which has none."""

    params: CreateParams
    instruction: str
    row: Mapping[str, Json] | None = field(default=None, repr=False)
    rollout_id: str | None = None

    @property
    def key(self) -> str | None:
        """By which a repeated request is known to be the same; None where Gym has no name for the rollout."""
        attempt = None if self.row is None else self.row.get(ATTEMPT)
        again = f"-a{attempt}" if isinstance(attempt, int) and attempt > 0 else ""
        return None if self.rollout_id is None else f"nemo-gym:{self.rollout_id}{again}"


def read_run(body: Json) -> Asked:
    """The body of `/run`: a BaseRunRequest with whatever its dataset's rows hold besides."""
    if not isinstance(body, dict):
        raise Refused("the body must be an object with responses_create_params", path="$")
    params = _params(body.get("responses_create_params"), "$.responses_create_params")
    return Asked(params=params, instruction=_instruction(params, "$.responses_create_params"), row=body, rollout_id=_rollout_id(body.get(ROLLOUT_ID)))


def read_responses(body: Json, *, rollout_id: str | None = None) -> Asked:
    """The body of `/v1/responses`."""
    params = _params(body, "$")
    return Asked(params=params, instruction=_instruction(params, "$"), rollout_id=_rollout_id(rollout_id))


def _params(value: Json, path: str) -> CreateParams:
    try:
        params = structure(value, CreateParams)
    except Refused as refused:
        raise Refused(str(refused), path=path + (refused.path or "$")[1:]) from None
    if params.tools:
        raise Refused("tools can not be given to a harness, which brings its own: leave them out of the dataset's rows", path=f"{path}.tools")
    if params.previous_response_id is not None:
        raise Refused("a harness begins anew each time: leave previous_response_id out", path=f"{path}.previous_response_id")
    return params


def _rollout_id(said: Json) -> str | None:
    if said is None:
        return None
    if not isinstance(said, str) or ROLLOUT_NAME.fullmatch(said) is None:
        raise Refused(f"{ROLLOUT_ID} must be letters, digits, '.', '_' or '-', beginning with a letter or digit", path=f"$.{ROLLOUT_ID}")
    return said


# ── an instruction ────────────────────────────────────────────────────────────


def _instruction(params: CreateParams, path: str) -> str:
    """All that the model would be told before it speaks, in one text: a harness takes no more."""
    given = (
        [("user", params.input)]
        if isinstance(params.input, str)
        else [_message(item, f"{path}.input[{index}]") for index, item in enumerate(params.input)]
    )
    texts = [params.instructions or "", *(text for _, text in given)]
    whole = "\n\n".join(text.strip() for text in texts if text.strip())
    if not whole:
        raise Refused("input is empty: say what the agent should do", path=f"{path}.input")
    return whole


def _message(item: Mapping[str, Json], path: str) -> tuple[str, str]:
    role = item.get("role")
    if item.get("type", "message") != "message" or role not in PROMPTING:
        what = f"a {role} message" if isinstance(role, str) else f"an item of type {item.get('type')!r}"
        raise Refused(f"{what} is of a conversation that has begun: a harness takes user, system and developer messages alone", path=path)
    return str(role), _text(item.get("content"), path)


def _text(content: Json, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused("content must be a text or a list of its parts", path=f"{path}.content")
    return "".join(_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _part(part: Json, path: str) -> str:
    match part:
        case {"type": "input_text", "text": str(text)}:
            return text
    raise Refused("only parts of type input_text can be told to a harness", path=path)
