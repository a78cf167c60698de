"""Polar's evaluators in our words, whose configs are named as Polar names them.

The rule for whoever edits it: a reward is what is trained, so that a judge with no counterpart here is refused, never noted. What stands in its
config is looked at by the evaluator itself, when the task is submitted.
"""

from collections.abc import Callable
from pathlib import Path

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.sources.folders import inline
from polarnode.sources.polar_shapes import PolarEvaluator
from polarnode.sources.swe import instance_value

Note = Callable[[str], None]
SWE = ("swebench_harness", "swegym_git_diff")
OWN_CONTAINER = "evaluator.refresh_runtime is false, and yet it judges in a clean runtime: what the agent left running could forge its reward"


def evaluator_value(told: PolarEvaluator | None, folder: Path, note: Note) -> dict[str, Json]:
    """An EvaluatorSpec as JSON."""
    if told is None:
        note("evaluator: it has none; here a session without one gets a reward of 1 for ending well")
        return {}
    config = dict(told.config)
    match told.strategy:
        case "session_completed":
            return {"name": "session_completed", "config": config}
        case "test_on_output":
            _refuse_env(told)
            _note_clean(told, note)
            return {"name": "test_on_output", "config": config}
        case "harbor":
            env: dict[str, Json] = {"env": dict(told.env)} if told.env else {}
            return {"name": "harbor", "config": {**_with_tests(config, folder), **env}, "fresh_runtime": told.refresh_runtime}
        case strategy if strategy in SWE:
            _refuse_env(told)
            _note_clean(told, note)
            return {"name": "swebench", "config": _with_instance(config)}
    raise Refused(f"the evaluator {told.strategy} is Polar's own: here there are others, see docs/evaluators.md", path="$.evaluator.strategy")


def _refuse_env(told: PolarEvaluator) -> None:
    if told.env:
        raise Refused(f"the evaluator {told.strategy} has no env of its own here: put it into its command", path="$.evaluator.env")


def _note_clean(told: PolarEvaluator, note: Note) -> None:
    if not told.refresh_runtime:
        note(OWN_CONTAINER)


def _with_tests(config: dict[str, Json], folder: Path) -> dict[str, Json]:
    """Files in the place of `tests_dir`, which is a folder of whoever submits."""
    tests = folder / str(_needed(config, "tests_dir"))
    if not tests.is_dir():
        raise Refused(f"{tests} is no folder: tests_dir names one, from the task's file on", path="$.evaluator.config.tests_dir")
    return {**config, "tests": inline(tests)}


def _with_instance(config: dict[str, Json]) -> dict[str, Json]:
    instance = _needed(config, "instance")
    if not isinstance(instance, dict):
        raise Refused("the instance is a dataset's row: a JSON object", path="$.evaluator.config.instance")
    return {**config, "instance": instance_value(instance)}


def _needed(config: dict[str, Json], name: str) -> Json:
    if name not in config:
        raise Refused(f"the evaluator needs {name}", path=f"$.evaluator.config.{name}")
    return config.pop(name)
