"""The schema of what is read, against what reads it."""

from typing import Any, Literal

import jsonschema_rs
import pytest
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st
from test_wire_tasks import SPECS

from polarnode.core.codec import read_task, structure, task_json
from polarnode.core.codec.schema import SchemaCollector
from polarnode.core.errors import Refused
from polarnode.core.task import CaptureSpec, TaskSpec


def validator(kind: Any) -> Any:
    schemas = SchemaCollector(strict=True, root="#/$defs/")
    found = schemas.of(kind)
    return jsonschema_rs.validator_for({**found, "$defs": schemas.named})


TASK = validator(TaskSpec)


@frozen(kw_only=True)
class Odd:
    """Every kind of field that a body may have."""

    word: Literal["a", "b"]
    maybe: int | None = None
    many: tuple[float, ...] = ()
    table: dict[str, bool] = field(factory=dict)
    own: "Odd | None" = None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=2),
    lambda part: st.lists(part, max_size=2),
    max_leaves=4,
)
ODD = st.dictionaries(
    st.sampled_from(["word", "maybe", "many", "table", "own", "other"]),
    JSON
    | st.sampled_from(["a", "b"])
    | st.dictionaries(st.text(max_size=1), st.booleans(), max_size=2)
    | st.just({"word": "a"}),
)


@given(spec=SPECS)
def test_every_task_fits_its_schema(spec: TaskSpec) -> None:
    """Every task there can be fits its schema."""
    assert TASK.is_valid(task_json(spec))


@given(value=ODD)
def test_schema_agrees_with_reader(value: Any) -> None:
    """The schema and the reader say the same."""
    try:
        structure(value, Odd, forbid_extra=True)
        taken = True
    except Refused:
        taken = False
    assert validator(Odd).is_valid(value) == taken


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"instruction": "x"},
        {"instruction": "x", "harness": {}, "extra": 1},
        {"instruction": 1, "harness": {}},
        {"instruction": "x", "harness": {"name": 5}},
    ],
)
def test_non_tasks_do_not_fit(value: Any) -> None:
    assert not TASK.is_valid(value)
    with pytest.raises(Refused):
        read_task(value)


def test_capture_has_its_own_schema() -> None:
    assert validator(CaptureSpec).is_valid({"metadata": {"a": [1, None]}, "sampling": {"stop": ["x"]}})
    assert not validator(CaptureSpec).is_valid({"instruction": "x"})


def test_answers_allow_growth_and_name_defaults() -> None:
    """Answers may grow, and defaults are in the schema."""
    schemas = SchemaCollector(strict=False)
    schemas.of(TaskSpec)
    task: Any = schemas.named["TaskSpec"]
    assert "additionalProperties" not in task
    assert task["properties"]["num_samples"] == {"type": "integer", "default": 1}
    assert set(task["required"]) == {"instruction", "harness"}


def test_unshapable_type_is_internal_error() -> None:
    """A type that JSON has no shape for is an internal error."""
    with pytest.raises(TypeError, match="bytes"):
        SchemaCollector(strict=True).of(bytes)
