"""A task with places for what a row of Gym's dataset says.

`{{input}}` is the instruction and `{{row.name}}` a field of the row (`{{row.metadata.id}}` of one inside another). A text that is nothing but
one place takes the field's value as it is, number or list. The rule for whoever edits it: no other braces are touched, because commands and
scripts stand in a task; and a place of an unknown kind is refused when the server starts, not in the middle of a collection.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import frozen

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.tasks import TaskSpec
from polarnode.web.nemo_gym.asked import INDICES, ROLLOUT_ID, Asked, CreateParams
from polarnode.wire import dump_json, read_task

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
                raise Refused(f"{{{{{name}}}}} is no place of a task template: there are {{{{input}}}} and {{{{row.field}}}}", path=path)
        for name in OURS:
            if self.value.get(name) is not None:
                raise Refused(f"{name} is not the template's to say: every rollout is a task of its own", path=f"$.{name}")
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
        return read_task({**filled, "sampling": _sampling(filled.get("sampling"), asked), "metadata": _metadata(filled.get("metadata"), asked)})


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
            return _text(value, asked, path)
        case dict():
            return {name: _filled(each, asked, f"{path}.{name}") for name, each in value.items()}
        case list():
            return [_filled(each, asked, f"{path}[{index}]") for index, each in enumerate(value)]
    return value


def _text(text: str, asked: Asked, path: str) -> Json:
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
            raise Refused(f"the row has no {name.removeprefix(ROW)}, which the task template needs at {path}", path=f"$.{name.removeprefix(ROW)}")
        value = value[part]
    return value
