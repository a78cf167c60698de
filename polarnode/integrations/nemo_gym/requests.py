"""What Gym asks of an agent server: the parameters of a Responses call and, around them, a row of its
dataset.

The rule for whoever edits it: what a harness can not be given (tools of the environment, a conversation that
has begun) is refused with its path. Left out silently it would be a reward for another task.

A task with places for what a row of Gym's dataset says.

`{{input}}` is the instruction and `{{row.name}}` a field of the row (`{{row.metadata.id}}` of one inside
another). A text that is nothing but one place takes the field's value as it is, number or list. The rule for
whoever edits it: no other braces are touched, because commands and scripts stand in a task; and a place of an
unknown kind is refused when the server starts, not in the middle of a collection.
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

# ── asked ────────────────────────────────────────────────────────────

# Gym's own word for one rollout, unique to it, and the indices that a collector counts in, which begin anew
# with each collection.
ROLLOUT_ID: Final = "_ng_rollout_id"
ATTEMPT: Final = "_ng_attempt_index"
INDICES: Final = ("_ng_task_index", "_ng_rollout_index", ATTEMPT)
ROLLOUT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PROMPTING: Final = ("user", "system", "developer")  # roles an instruction may be made of


@frozen(kw_only=True)
class CreateParams:
    """`responses_create_params`, as far as an agent that is no model reads them; the rest (`store`,
    `include`, `user` …) means nothing to it.
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
class Asked:
    """One rollout that is asked for. `row` is the whole body of `/run`; None where `/v1/responses` was
    called, which has none.
    """

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
    return Asked(
        params=params,
        instruction=_instruction(params, "$.responses_create_params"),
        row=body,
        rollout_id=_rollout_id(body.get(ROLLOUT_ID)),
    )


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
        raise Refused(
            "tools can not be given to a harness, which brings its own: leave them out of the dataset's rows",
            path=f"{path}.tools",
        )
    if params.previous_response_id is not None:
        raise Refused(
            "a harness begins anew each time: leave previous_response_id out",
            path=f"{path}.previous_response_id",
        )
    return params


def _rollout_id(said: Json) -> str | None:
    if said is None:
        return None
    if not isinstance(said, str) or ROLLOUT_NAME.fullmatch(said) is None:
        raise Refused(
            f"{ROLLOUT_ID} must be letters, digits, '.', '_' or '-', beginning with a letter or digit",
            path=f"$.{ROLLOUT_ID}",
        )
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
    raise Refused("only parts of type input_text can be told to a harness", path=path)


# ── template ────────────────────────────────────────────────────────────

PLACE: Final = re.compile(r"\{\{\s*([A-Za-z_][\w.-]*)\s*\}\}")
INPUT, ROW = "input", "row."
OURS: Final = ("task_id", "group_id", "callback_url", "callback_format")  # each rollout's own, or nobody's


@frozen(kw_only=True)
class Template:
    """A TaskSpec as JSON, whole but for its instruction, which is `{{input}}` where it says none."""

    value: Mapping[str, Json]

    def __attrs_post_init__(self) -> None:
        for path, name in _places(dict(self.value), "$"):
            if name != INPUT and not name.startswith(ROW):
                raise Refused(
                    f"{{{{{name}}}}} is no place of a task template: there are {{{{input}}}} and"
                    " {{row.field}}",
                    path=path,
                )
        for name in OURS:
            if self.value.get(name) is not None:
                raise Refused(
                    f"{name} is not the template's to say: every rollout is a task of its own",
                    path=f"$.{name}",
                )
        if self.value.get("num_samples", 1) != 1:
            raise Refused("num_samples must be 1: Gym asks for each rollout by itself", path="$.num_samples")
        if not self.needs_row:
            self.task(Asked(params=CreateParams(input=""), instruction="Say a word."))

    @property
    def needs_row(self) -> bool:
        """Whether some of it stands in the dataset's rows alone."""
        return any(name.startswith(ROW) for _, name in _places(dict(self.value), "$"))

    def task(self, asked: Asked) -> TaskSpec:
        """The task of one rollout. Refused with the path of what it lacks, in the template or in the row."""
        filled = _filled({"instruction": f"{{{{{INPUT}}}}}", **self.value}, asked, "$")
        if not isinstance(filled, dict):
            raise Refused("a task template must be an object", path="$")
        return read_task(
            {
                **filled,
                "sampling": _sampling(filled.get("sampling"), asked),
                "metadata": _metadata(filled.get("metadata"), asked),
            }
        )


def _sampling(said: Json, asked: Asked) -> Json:
    """The template's, with what the row asks of the model over it."""
    params = asked.params
    over = {"temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_output_tokens}
    wanted: dict[str, Json] = {name: value for name, value in over.items() if value is not None}
    return {**said, **wanted} if isinstance(said, dict) else wanted if said is None else said


def _metadata(said: Json, asked: Asked) -> Json:
    """The template's, with whose rollout it is."""
    row = asked.row or {}
    whose: dict[str, Json] = {name: row[name] for name in INDICES if name in row}
    whose |= {} if asked.rollout_id is None else {ROLLOUT_ID: asked.rollout_id}
    return {**said, **whose} if isinstance(said, dict) else whose if said is None else said


# ── places ────────────────────────────────────────────────────────────────────


def _places(value: Json, path: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield from ((path, found[1]) for found in PLACE.finditer(value))
        case dict():
            for name, each in value.items():
                yield from _places(each, f"{path}.{name}")
        case list():
            for index, each in enumerate(value):
                yield from _places(each, f"{path}[{index}]")


def _filled(value: Json, asked: Asked, path: str) -> Json:
    match value:
        case str():
            return _template_text(value, asked, path)
        case dict():
            return {name: _filled(each, asked, f"{path}.{name}") for name, each in value.items()}
        case list():
            return [_filled(each, asked, f"{path}[{index}]") for index, each in enumerate(value)]
    return value


def _template_text(text: str, asked: Asked, path: str) -> Json:
    alone = PLACE.fullmatch(text)
    if alone is not None:
        return _said(alone[1], asked, path)
    return PLACE.sub(lambda found: _as_text(_said(found[1], asked, path)), text)


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else dump_json(value).decode()


def _said(name: str, asked: Asked, path: str) -> Json:
    if name == INPUT:
        return asked.instruction
    if asked.row is None:
        raise Refused(f"the task needs {name} of a dataset's row, which only /run has: ask there", path=path)
    value: Json = dict(asked.row)
    for part in name.removeprefix(ROW).split("."):
        if not isinstance(value, dict) or part not in value:
            raise Refused(
                f"the row has no {name.removeprefix(ROW)}, which the task template needs at {path}",
                path=f"$.{name.removeprefix(ROW)}",
            )
        value = value[part]
    return value
