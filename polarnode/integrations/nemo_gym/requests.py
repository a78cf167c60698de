"""Gym's requests to an agent server (the parameters of a Responses call and, around them, a row of a
dataset), and the task template that a request fills in.

Anything that a harness cannot take (tools of the environment, a conversation that has begun) is refused with
its path: if it were left out silently, the reward would belong to another task. In a template `{{input}}` is
the instruction and `{{row.name}}` a field of the row (`{{row.metadata.id}}` a nested one). A string that
consists of one placeholder takes the field's value with its type. Other braces are left alone, because tasks
hold commands and scripts; an unknown placeholder is refused when the server starts, not in the middle of a
collection.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import field, frozen

from polarnode.core.codec.json import dump_json, structure
from polarnode.core.codec.tasks import read_task
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.task import TaskSpec
from polarnode.integrations.rollout_tasks import check_whole_groups
from polarnode.integrations.trainer_sampling import trained_sampling

# ── requests ────────────────────────────────────────────────────────────

# Gym's unique name of one rollout, and the indices that a collector counts in, which restart with each
# collection.
ROLLOUT_ID_KEY: Final = "_ng_rollout_id"
ATTEMPT_KEY: Final = "_ng_attempt_index"
INDEX_KEYS: Final = ("_ng_task_index", "_ng_rollout_index", ATTEMPT_KEY)
ROLLOUT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PROMPT_ROLES: Final = ("user", "system", "developer")  # the roles of an instruction's messages


@frozen(kw_only=True)
class CreateParams:
    """`responses_create_params`, without the fields that mean nothing to an agent (`store`, `include`,
    `user` …).
    """

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
class GymRequest:
    """One requested rollout. `row` is the whole body of `/run`; None for `/v1/responses`, which has none."""

    params: CreateParams
    instruction: str
    row: Mapping[str, Json] | None = field(default=None, repr=False)
    rollout_id: str | None = None

    @property
    def key(self) -> str | None:
        """The idempotency key of the rollout; None if Gym has no name for it."""
        attempt = None if self.row is None else self.row.get(ATTEMPT_KEY)
        again = f"-a{attempt}" if isinstance(attempt, int) and attempt > 0 else ""
        return None if self.rollout_id is None else f"nemo-gym:{self.rollout_id}{again}"


def read_run_request(body: Json) -> GymRequest:
    """Read the body of `/run`: a BaseRunRequest with the other fields of its dataset's row."""
    if not isinstance(body, dict):
        raise Refused("the body must be an object with responses_create_params", path="$")
    params = _read_params(body.get("responses_create_params"), "$.responses_create_params")
    return GymRequest(
        params=params,
        instruction=_join_instruction(params, "$.responses_create_params"),
        row=body,
        rollout_id=_rollout_id(body.get(ROLLOUT_ID_KEY)),
    )


def read_responses_request(body: Json, *, rollout_id: str | None = None) -> GymRequest:
    """Read the body of `/v1/responses`."""
    params = _read_params(body, "$")
    return GymRequest(
        params=params, instruction=_join_instruction(params, "$"), rollout_id=_rollout_id(rollout_id)
    )


def _read_params(value: Json, path: str) -> CreateParams:
    try:
        params = structure(value, CreateParams)
    except Refused as refused:
        raise Refused(str(refused), path=path + (refused.path or "$")[1:]) from None
    if params.tools:
        raise Refused(
            "a harness brings its own tools and takes no others: leave them out of the dataset's rows",
            path=f"{path}.tools",
        )
    if params.previous_response_id is not None:
        raise Refused(
            "a harness starts fresh each time: leave previous_response_id out",
            path=f"{path}.previous_response_id",
        )
    return params


def _rollout_id(value: Json) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or ROLLOUT_NAME.fullmatch(value) is None:
        raise Refused(
            f"{ROLLOUT_ID_KEY} must be letters, digits, '.', '_' or '-', beginning with a letter or digit",
            path=f"$.{ROLLOUT_ID_KEY}",
        )
    return value


# ── an instruction ────────────────────────────────────────────────────────────


def _join_instruction(params: CreateParams, path: str) -> str:
    """All messages of the prompt in one text, because a harness takes only one."""
    messages = (
        [("user", params.input)]
        if isinstance(params.input, str)
        else [_message(item, f"{path}.input[{index}]") for index, item in enumerate(params.input)]
    )
    texts = [params.instructions or "", *(text for _, text in messages)]
    whole = "\n\n".join(text.strip() for text in texts if text.strip())
    if not whole:
        raise Refused("input is empty: say what the agent should do", path=f"{path}.input")
    return whole


def _message(item: Mapping[str, Json], path: str) -> tuple[str, str]:
    role = item.get("role")
    if item.get("type", "message") != "message" or role not in PROMPT_ROLES:
        what = f"a {role} message" if isinstance(role, str) else f"an item of type {item.get('type')!r}"
        raise Refused(
            f"{what} is of a conversation that has begun: a harness takes user, system and developer messages"
            " alone",
            path=path,
        )
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
    raise Refused("a harness takes only parts of type input_text", path=path)


# ── template ────────────────────────────────────────────────────────────

PLACEHOLDER: Final = re.compile(r"\{\{\s*([A-Za-z_][\w.-]*)\s*\}\}")
INPUT, ROW = "input", "row."
OURS: Final = (
    "task_id",
    "group_id",
    "callback_url",
    "callback_format",
)  # these fields are set for each rollout, or not at all


# What to use in NeMo RL in place of a task's settings of whole groups, because here each rollout is a task of
# its own.
OWN_GROUPS: Final[Mapping[str, str]] = {
    "drop_uniform_reward": "set grpo.use_dynamic_sampling: true in NeMo RL",
    "early_stop_min": "set grpo.num_generations_per_prompt to the samples wanted; NeMo RL waits for them all",
    "max_staleness": "set grpo.async_grpo.max_trajectory_age_steps in NeMo RL",
    "min_usable": "look at the masked samples in NeMo RL's metrics; it has no such minimum",
}


@frozen(kw_only=True)
class TaskTemplate:
    """A TaskSpec as JSON with placeholders. If it has no instruction, `{{input}}` is used. Raises Refused for
    an unknown placeholder and for fields that are each rollout's own.
    """

    value: Mapping[str, Json]

    def __attrs_post_init__(self) -> None:
        for path, name in _find_placeholders(dict(self.value), "$"):
            if name != INPUT and not name.startswith(ROW):
                raise Refused(
                    f"{{{{{name}}}}} is no placeholder of a task template: there are {{{{input}}}} and"
                    " {{row.field}}",
                    path=path,
                )
        for name in OURS:
            if self.value.get(name) is not None:
                raise Refused(
                    f"{name} does not belong in a template: every rollout is a task of its own",
                    path=f"$.{name}",
                )
        if self.value.get("num_samples", 1) != 1:
            raise Refused("num_samples must be 1: Gym requests each rollout by itself", path="$.num_samples")
        group = self.value.get("group")
        if isinstance(group, dict):
            check_whole_groups(group, OWN_GROUPS)
        if not self.needs_row:
            self.task(GymRequest(params=CreateParams(input=""), instruction="Say a word."))

    @property
    def needs_row(self) -> bool:
        """Whether the template has placeholders of the dataset's row."""
        return any(name.startswith(ROW) for _, name in _find_placeholders(dict(self.value), "$"))

    def task(self, request: GymRequest) -> TaskSpec:
        """The task of one rollout. Raises Refused with the path of the missing field."""
        filled = _filled({"instruction": f"{{{{{INPUT}}}}}", **self.value}, request, "$")
        if not isinstance(filled, dict):
            raise Refused("a task template must be an object", path="$")
        return read_task(
            {
                **filled,
                "sampling": _sampling(filled.get("sampling"), request),
                "metadata": _metadata(filled.get("metadata"), request),
            }
        )


def _sampling(template: Json, request: GymRequest) -> Json:
    """The template's sampling, with the request's parameters merged over it."""
    params = request.params
    over = {"temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_output_tokens}
    return trained_sampling(template, over)


def _metadata(template: Json, request: GymRequest) -> Json:
    """The template's metadata, with the rollout's ids."""
    row = request.row or {}
    ids: dict[str, Json] = {name: row[name] for name in INDEX_KEYS if name in row}
    ids |= {} if request.rollout_id is None else {ROLLOUT_ID_KEY: request.rollout_id}
    return _merged(template, ids)


def _merged(value: Json, over: dict[str, Json]) -> Json:
    """`over` merged over an object or null. Any other value is kept, and is refused later as a field of a
    task.
    """
    return {**value, **over} if isinstance(value, dict) else over if value is None else value


# ── placeholders ────────────────────────────────────────────────────────────────────


def _find_placeholders(value: Json, path: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield from ((path, found[1]) for found in PLACEHOLDER.finditer(value))
        case dict():
            for name, each in value.items():
                yield from _find_placeholders(each, f"{path}.{name}")
        case list():
            for index, each in enumerate(value):
                yield from _find_placeholders(each, f"{path}[{index}]")


def _filled(value: Json, request: GymRequest, path: str) -> Json:
    match value:
        case str():
            return _template_text(value, request, path)
        case dict():
            return {name: _filled(each, request, f"{path}.{name}") for name, each in value.items()}
        case list():
            return [_filled(each, request, f"{path}[{index}]") for index, each in enumerate(value)]
    return value


def _template_text(text: str, request: GymRequest, path: str) -> Json:
    alone = PLACEHOLDER.fullmatch(text)
    if alone is not None:
        return _value_of(alone[1], request, path)
    return PLACEHOLDER.sub(lambda found: _as_text(_value_of(found[1], request, path)), text)


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else dump_json(value).decode()


def _value_of(name: str, request: GymRequest, path: str) -> Json:
    if name == INPUT:
        return request.instruction
    if request.row is None:
        raise Refused(f"the task needs {name} of a dataset's row, which only /run has: call that", path=path)
    value: Json = dict(request.row)
    for part in name.removeprefix(ROW).split("."):
        if not isinstance(value, dict) or part not in value:
            raise Refused(
                f"the row has no {name.removeprefix(ROW)}, which the task template needs at {path}",
                path=f"$.{name.removeprefix(ROW)}",
            )
        value = value[part]
    return value
