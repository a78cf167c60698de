"""Compare the pages with the program: names exist, and every field, route and setting is documented."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import attrs
import click
import pytest
from control_plane_parts import TaskTaker, other_room_extensions
from journal_samples import make_trajectory

from polarnode.api.app import BODY_BYTES, control_plane
from polarnode.api.query import READERS
from polarnode.api.routes import ControlRoutes
from polarnode.api.service import SENTENCES
from polarnode.cli.main import main as command
from polarnode.core import codec
from polarnode.core.conversation import Sampling, Usage
from polarnode.core.task import (
    Budgets,
    BuilderSpec,
    CaptureEnd,
    CaptureSpec,
    CarrySpec,
    EvaluationSpec,
    EvaluatorPart,
    EvaluatorSpec,
    FileSpec,
    GroupSpec,
    HarnessSpec,
    McpServerSpec,
    PrepareStep,
    RuntimeSpec,
    SnapshotSpec,
    TaskSpec,
    VolumeSpec,
)
from polarnode.core.trajectory import Clock, Outcome, Status, Timing, TurnKind, TurnRole, TurnState
from polarnode.engine.protocol import Simulation
from polarnode.evaluators.command import CommandConfig
from polarnode.evaluators.judging import JudgeConfig
from polarnode.evaluators.registry import EVALUATORS
from polarnode.harnesses import HARNESSES
from polarnode.journal.journal import Journal, open_journal
from polarnode.journal.values import EventKind, RetentionLimits
from polarnode.node.config import TINY_MODEL, NodeConfig, TeacherConfig
from polarnode.providers.contract import Fault, FaultKind, Operation
from polarnode.providers.dialect import route

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
API = (ROOT / "docs" / "api.md").read_text()
README = (ROOT / "README.md").read_text()
SPECS = (
    TaskSpec,
    HarnessSpec,
    McpServerSpec,
    RuntimeSpec,
    FileSpec,
    PrepareStep,
    BuilderSpec,
    EvaluationSpec,
    EvaluatorSpec,
    EvaluatorPart,
    VolumeSpec,
    JudgeConfig,
    TeacherConfig,
    CommandConfig,
    Budgets,
    Sampling,
    CarrySpec,
    GroupSpec,
    SnapshotSpec,
    CaptureSpec,
    CaptureEnd,
)


def section(title: str, page: str = API) -> str:
    """What stands below a heading, up to the next of any level."""
    found = re.search(rf"^#+ {re.escape(title)}$\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {title}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in a text, without their headers."""
    for line in text.splitlines():
        if line.startswith("| `") or (line.startswith("| ") and line[2:5].isdigit()):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def named(text: str) -> list[str]:
    """What stands in backquotes, fenced blocks aside."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


# ── specs and settings ────────────────────────────────────────────────────────


def shown_default(field: "attrs.Attribute[Any]") -> str:
    """A default as the page writes it."""
    default = field.default
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "`{}`"
    return (
        "–"
        if default is None
        else f"`{json.dumps(list(default) if isinstance(default, tuple) else default)}`"
    )


@pytest.mark.parametrize("cls", SPECS, ids=lambda cls: cls.__name__)
def test_every_spec_field_is_documented(cls: Any) -> None:
    """Every field of a spec is documented with its default."""
    documented = {named(cells[0])[0]: cells[1] for cells in rows(section(cls.__name__))}
    assert documented == {field.alias: shown_default(field) for field in attrs.fields(cls)}


def test_every_setting_is_documented() -> None:
    """Every setting is documented with its default and its flag."""
    cells = {named(row[0])[0]: row[1:] for row in rows(section("Settings of a node"))}
    expected = {field.name: shown_default(field) for field in attrs.fields(NodeConfig)} | {
        "model": "the embedded polarnode-tiny"
    }
    assert NodeConfig().model == str(TINY_MODEL)
    assert {name: row[1] for name, row in cells.items()} == expected
    flags = {option: each.name for each in command.params for option in each.opts if each.name in expected}
    assert {flag: name for name, row in cells.items() for flag in named(row[0])} == flags


def test_harnesses_and_evaluators_are_documented() -> None:
    assert set(HARNESSES) <= set(named(section("HarnessSpec")))
    assert set(EVALUATORS) <= {name.strip('"') for name in named(section("EvaluatorSpec"))}


# ── routes ────────────────────────────────────────────────────────────────────


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    async with open_journal(tmp_path / "journal", now=lambda: 1.0) as opened:
        yield opened


async def test_every_control_route_is_documented(journal: Journal) -> None:
    app = control_plane(
        ControlRoutes(service=TaskTaker(journal=journal)).rows(),
        token=None,
        extensions=other_room_extensions(journal),
    )
    served = {
        f"{method} {re.sub('<(?:path:)?([a-z_]+)>', '{' + chr(92) + '1}', rule.rule)}"
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert {named(cells[0])[0] for cells in rows(section("Control plane")) if " /" in cells[0]} == served


def test_every_parameter_is_documented() -> None:
    assert set(READERS) <= set(named(section("Control plane")))
    assert f"{BODY_BYTES >> 20} MiB" in section("Control plane")


def test_model_routes_match_the_page() -> None:
    documented = [named(cells[0])[0].split(" ") for cells in rows(section("Model plane"))]
    served = {
        path: route(method, path.replace("{model}", "m"), {}) for method, path in documented if path != "/"
    }
    assert None not in served.values(), served
    assert {found.dialect.name for found in served.values() if found is not None} == set(
        named(row_of("`provider`", section("Turn")))
    )
    assert {found.operation for found in served.values() if found is not None} == set(get_args(Operation))


FAULTS: dict[str, FaultKind] = {
    "an invalid field": "bad_request",
    "unknown key": "unauthorized",
    "the session is over": "session_over",
    "context too long": "context_too_long",
    "a budget of turns or tokens is spent": "budget_spent",
    "overload": "overloaded",
    "the engine failed": "engine_failed",
    "cancelled by new weights": "cancelled",
    "a body over its limit, on a route without a prompt": "too_large",
}


@pytest.mark.parametrize("begin", FAULTS)
def test_every_fault_is_documented(begin: str) -> None:
    """Every fault is documented in the words of each API."""
    cells = [
        cell.strip()
        for cell in next(
            line for line in section("Model plane").splitlines() if line.startswith(f"| {begin}")
        )
        .strip("|")
        .split("|")
    ]
    paths = (
        ("/v1/chat/completions", 1),
        ("/v1/responses", 1),
        ("/v1/messages", 2),
        ("/v1beta/models/m:generateContent", 3),
    )
    for path, place in paths:
        found = route("POST", path, {})
        assert found is not None
        reply = found.dialect.error(Fault(kind=FAULTS[begin], message="m"))
        assert cells[place].startswith(str(reply.status)), path
        assert all(f'"{word}"' in reply.body.decode() for word in named(cells[place])), path


def row_of(begin: str, text: str) -> str:
    """The rest of the row that begins so."""
    return next(line for line in text.splitlines() if line.startswith(f"| {begin}")).split("|", 2)[2]


def test_simulated_engine_settings_are_documented() -> None:
    documented = {named(cells[0])[0]: cells[1] for cells in rows(section("A simulated engine"))}
    assert documented == {field.name: shown_default(field) for field in attrs.fields(Simulation)}


async def test_control_plane_has_no_root(journal: Journal) -> None:
    app = control_plane(ControlRoutes(service=TaskTaker(journal=journal)).rows(), token=None)
    rules = {rule.rule for rule in app.url_map.iter_rules()}
    assert not rules & {"/"}


# ── shapes ────────────────────────────────────────────────────────────────────


def fields_of(title: str) -> set[str]:
    return {name for cells in rows(section(title)) for name in named(cells[0])}


def test_every_trajectory_field_is_documented() -> None:
    value: Any = codec.trajectory_json(make_trajectory("s"), turns="full")
    assert fields_of("Trajectory") == set(value)
    assert fields_of("Trace") == set(value["traces"][0])
    table: Any = codec.trajectory_json(make_trajectory("s"))
    documented = [name for cells in rows(section("Turn")) for name in named(cells[0])]
    assert set(documented[: len(table["turns"][0])]) == set(table["turns"][0])
    assert set(documented) == set(value["turns"][0])
    assert fields_of("Outcome") == {field.name for field in attrs.fields(Outcome)}
    for cls, where in ((Timing, "Trajectory"), (Usage, "Turn")):
        assert {field.name for field in attrs.fields(cls)} <= set(named(section(where)))


def test_every_enum_word_is_documented() -> None:
    assert set(get_args(Status)) | set(get_args(Clock)) <= set(named(section("Outcome")))
    assert {*get_args(TurnKind), *get_args(TurnState), *get_args(TurnRole)} <= set(named(section("Turn")))


def test_events_and_their_example_are_documented() -> None:
    """The events are documented, and the example is of their shape."""
    text = section("Events")
    assert {*get_args(EventKind), "gap", "error"} <= set(named(text))
    for kind, seq, data in re.findall(r"^event: (\w+)\nid: (\d+)\ndata: (.*)$", text, re.MULTILINE):
        value = json.loads(data.replace('"traces":[…],…', '"traces":[]'))
        assert set(value) == {"seq", "journal", "key", kind}
        assert value["seq"] == int(seq)
        assert value["key"].startswith(f"{kind}:")
    kept = RetentionLimits()
    assert f"{kept.acknowledged >> 30} GiB" in text
    assert f"{kept.everything >> 30} GiB" in text


def test_every_error_is_documented() -> None:
    documented = {int(cells[0]): named(cells[1]) for cells in rows(section("Errors"))}
    for status, (kind, _) in SENTENCES.items():
        assert kind in documented[status]
    source = (ROOT / "polarnode" / "api" / "service.py").read_text()
    for kind, status in re.findall(r'error_json\("(\w+)".*?\), (\d+)', source):
        assert kind in documented[int(status)]


# ── examples, links, commands ─────────────────────────────────────────────────


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_and_json_examples_are_valid(page: Path) -> None:
    """Examples in TOML are tasks, and those in JSON are JSON."""
    for block in blocks(page.read_text(), "toml"):
        assert codec.read_task(codec.read_toml_value(block)).harness.name in HARNESSES
        assert len(tomllib.loads(block)) >= 3
    for block in blocks(page.read_text(), "json"):
        json.loads(block)


def test_readme_task_is_valid() -> None:
    (block,) = blocks(README, "toml")
    assert codec.read_task(codec.read_toml_value(block)).num_samples > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_commands_exist(page: Path) -> None:
    text = page.read_text()
    called = re.findall(
        r"(?:^|[`/ ])polarnode ((?:-|[a-z])[^`\n#&|]*)",
        "\n".join(blocks(text, "sh") + re.findall(r"`(polarnode [^`\n]+)`", text)),
        re.MULTILINE,
    )
    for line in called:
        words = [word for word in line.split() if word not in ("…", "/")]
        verb = command if words[0].startswith("-") else command.commands.get(words[0])
        assert verb is not None, f"{page.name}: polarnode {line}"
        if isinstance(verb, click.Group) and len(words) > 1:
            verb = verb.commands.get(words[1], verb)
        known = {option for each in verb.params for option in each.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known, f"{page.name}: polarnode {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_targets_exist(page: Path) -> None:
    text, targets = page.read_text(), re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert target in targets, target
    for name in re.findall(
        r"(?<![\w./-])((?:polarnode|examples|tests|tools|runtimes|benchmarks)/[\w./-]*[\w/])", text
    ):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_command_is_documented() -> None:
    assert isinstance(command, click.Group)
    documented = "\n".join(page.read_text() for page in PAGES)
    assert [verb for verb in command.commands if f"polarnode {verb}" not in documented] == []
