"""What a model speaks, as a table for people: its ids, how its turns end, how it calls and thinks, and what
its template can not be asked.

Pure: a loaded model in, rich renderables out. Whoever adds a call syntax adds its words to `_SYNTAXES`; a row
says nothing that a model does not do.

`polarnode doctor`: what this machine has for a node, what it lacks, and what to do. Starts no engine and no
container; asks each judge one word.

The rule for whoever edits it: a finding is not ok only where a node would not start with these settings; what
only costs speed is ok and says so.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import trio
from attrs import evolve
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polarnode.cli.output import harmless, open_console
from polarnode.containers.probe import Finding, default_state_dir, probe
from polarnode.containers.recipes import Recipes, default_runtimes_dir, read_recipes
from polarnode.core import codec
from polarnode.core.conversation import Conversation, Message
from polarnode.core.errors import ConfigError, EvaluatorError, ModelError, Refused
from polarnode.core.ports import Question
from polarnode.evaluators.judging import JudgeConfig, json_of
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.opening import simulated_marks
from polarnode.rollouts.judges import open_judges
from polarnode.tokens.families import CallSyntax, Family
from polarnode.tokens.template import LoadedModel, load_model

# ── language ────────────────────────────────────────────────────────────

_SYNTAXES: Final[Mapping[CallSyntax, str]] = {
    "none": "none: it has no way to call tools",
    "json": 'JSON, {"name": …, "arguments": {…}}',
    "bare_json": 'the whole answer is JSON, {"name": …, "parameters": {…}}',
    "function_xml": "XML, <function=name><parameter=key>value</parameter></function>",
    "invoke_xml": 'XML, <invoke name="name"><parameter name="key">value</parameter></invoke>',
    "arg_xml": "name<arg_key>key</arg_key><arg_value>value</arg_value>",
    "fenced": "function, its name, and the arguments in a fence of JSON",
    "separated": "its name, a separator and JSON arguments",
    "numbered": "functions.name:0 and JSON arguments",
    "braces": "call:name{key:value}",
    "harmony": "a message to functions.name, whose text is JSON arguments",
}
_ASKED: Final = {True: "with thinking on", False: "with thinking off"}
_NEW: Final = {"user": Message(role="user", text="x"), "tool": Message(role="tool", text="x", call_id="c")}
_REFUSED: Final[Mapping[str, str]] = {
    "tools": "tools",
    "calls": "calls of tools",
    "tool": "results of tools",
    "late system": "system messages after the head",
    "two systems": "two system messages at the head",
    "several results": "results of several calls of one turn",
}


def language(model: LoadedModel) -> Table:
    """The table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(model):
        table.add_row(name, Text(harmless(value)))
    return table


def rows(model: LoadedModel) -> Iterator[tuple[str, str]]:
    """Each line of it: what it is about, and what is so."""
    family, names = model.family, {number: text for text, number in model.tokenizer.control.items()}
    yield "family", family.name
    yield (
        "vocabulary",
        f"{model.tokenizer.vocab_size} ids, {len(names)} of them control tokens; {model.tokenizer.kind}",
    )
    yield "ends a turn", ", ".join(f"{names[token]} ({token})" for token in family.stop_ids)
    if family.turn_end is None:
        yield "", "no mark of its own: the next header ends a turn, and a sample that was cut"
    yield "calls", _calls(family, names)
    yield "thinking", _thinking(model, names)
    if family.harmony is not None or family.think_open is not None:
        yield "earlier thinking", _earlier(model)
    limits = model.template.limits
    refused = [
        _REFUSED.get(kind, kind)
        for kind in dict.fromkeys((*limits.sentences, *family.refuses))
        if kind not in limits.otherwise
    ]
    yield "refuses", ", ".join(refused) or "nothing: every role and tools are taken"


def _calls(family: Family, names: Mapping[int, str]) -> str:
    marks = [names[token] for token in (family.section_open, family.call_open) if token is not None]
    between = f", after {' '.join(marks)}" if marks and family.call_syntax != "none" else ""
    return _SYNTAXES[family.call_syntax] + between


def _thinking(model: LoadedModel, names: Mapping[int, str]) -> str:
    family = model.family
    if family.harmony is not None:
        return "messages of the channel analysis"
    if family.think_open is None or family.think_close is None:
        return "none: it has no marks for thoughts"
    told = {asked: _opened(model, asked) for asked in (None, True, False)}
    said = ["the prompt opens it" if told[None] else "the model opens it"]
    said += [
        f"{words} {'the prompt opens it' if told[asked] else 'it does not'}"
        for asked, words in _ASKED.items()
        if told[asked] != told[None]
    ]
    return f"{names[family.think_open]} to {names[family.think_close]}; {', '.join(said)}"


def _opened(model: LoadedModel, thinking: bool | None) -> bool:
    return model.template.opens_thinking(
        model.template.root(Conversation(messages=(Message(role="user", text="x"),), thinking=thinking))
    )


def _earlier(model: LoadedModel) -> str:
    """What the template does with thoughts of earlier turns when a user or a tool speaks."""
    after = [role for role, new in _NEW.items() if model.template.drops_thinking_before((new,))]
    left_out = (
        f"left out by the template before {' and '.join(f'{role} messages' for role in after)}"
        if after
        else "kept by the template"
    )
    return f'{left_out}; sampled thoughts are kept in any case, unless a task says thinking = "template"'


# ── doctor ────────────────────────────────────────────────────────────

# seconds for a judge's answer to a question of one word; a server that loads its model takes longer, and is
# not ready
JUDGE_S = 30.0
PROBE = Question(
    messages=({"role": "user", "content": 'Answer with the JSON object {"ready": true} and nothing else.'},),
    schema={
        "type": "object",
        "properties": {"ready": {"type": "boolean"}},
        "required": ["ready"],
        "additionalProperties": False,
    },
)
NVIDIA_SMI_S = 10.0  # seconds; it answers in one, and hangs where a driver is broken
ENOUGH_DISK = 10 << 30  # bytes: four runtime images and their base are about 4 GB


def examine(config: NodeConfig) -> int:
    """Print every finding as it is made; returns 0 when a node would start here."""
    console, faults = open_console(), 0
    for finding in findings(config):
        if isinstance(finding, Table):
            console.print(finding)
            continue
        show(console, finding)
        faults += not finding.ok
    if faults:
        console.print(
            f"\n{faults} of these in the way (✗): do what the arrows say, then run polarnode doctor again",
            style="red",
        )
    else:
        console.print(
            f"\na node starts here; try: polarnode run {_where(config)} examples/demo/pi.toml", style="green"
        )
    return int(faults > 0)


def _where(config: NodeConfig) -> str:
    return "--engine simulated" if config.engine == "simulated" else "--gpus 0" if config.gpus else "--cpu"


def findings(config: NodeConfig) -> Iterator[Finding | Table]:
    """Everything, the quick first. The model takes seconds: its tokenizer is loaded and its template audited,
    and a table says what it speaks.
    """
    state_dir = Path(config.podman_dir) if config.podman_dir else default_state_dir()
    yield from trio.run(probe, state_dir).findings
    yield disk(state_dir)
    yield recipes(config)
    if config.engine == "simulated":
        yield simulated(config)
    else:
        yield sglang(config)
        yield gpus(config)
    yield from judges(config, os.environ)
    yield from model(Path(config.model), simulated=config.engine == "simulated")


def show(console: Console, finding: Finding) -> None:
    """A finding in one line, and what to do in another."""
    mark = Text("✓ ", style="green") if finding.ok else Text("✗ ", style="red")
    console.print(mark + Text(harmless(f"{finding.name}: {finding.what}")))
    if finding.remedy:
        console.print(Text(harmless(f"  → {finding.remedy}"), style="dim" if finding.ok else "yellow"))


def sglang(config: NodeConfig) -> Finding:
    """The engine's package, looked up without importing it: the node's process never does."""
    if importlib.util.find_spec("sglang") is None:
        return Finding(
            name="sglang",
            ok=False,
            what="not installed",
            remedy="run `make setup`, or pip install 'polarnode[gpu]' on a GPU host",
        )
    version = importlib.metadata.version("sglang")
    if importlib.util.find_spec("sgl_kernel") is not None:
        return Finding(name="sglang", ok=True, what=f"{version}, full: serves on GPUs")
    remedy = "pip install 'polarnode[gpu]' (about 4 GB)" if config.gpus else ""
    return Finding(
        name="sglang", ok=not config.gpus, what=f"{version}, slim: serves with --cpu only", remedy=remedy
    )


def simulated(config: NodeConfig) -> Finding:
    """That answers will be random is said first of all; nothing of the machine can stand in the way of it."""
    hosts, told = max(1, len(config.gpus) // config.tp), config.simulated
    speed = f"{hosts} × {told.max_running} requests of {told.tokens_per_s:g} tokens/s"
    return Finding(
        name="engine", ok=True, what=f"simulated: EVERY ANSWER IS RANDOM, no model is loaded; {speed}"
    )


def gpus(config: NodeConfig) -> Finding:
    """The GPUs nvidia-smi lists, against those the node is to use. None is no fault where none is
    asked for.
    """
    if shutil.which("nvidia-smi") is None:
        return _gpus(config, 0)
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return Finding(
            name="gpus",
            ok=False,
            what="nvidia-smi does not answer",
            remedy="look at the driver: dmesg | grep -i nvrm",
        )
    return _gpus(config, sum(line.startswith("GPU ") for line in listed.splitlines()))


def _gpus(config: NodeConfig, count: int) -> Finding:
    missing = [number for number in config.gpus if number >= count]
    if missing:
        named = ", ".join(map(str, missing))
        remedy = (
            f"use --gpus 0-{count - 1}"
            if count
            else "use --cpu, or look for the driver: nvidia-smi -L should list them"
        )
        return Finding(name="gpus", ok=False, what=f"{count} are there, and not {named}", remedy=remedy)
    return Finding(
        name="gpus", ok=True, what=f"{count}: use --gpus 0-{count - 1}" if count else "none: use --cpu"
    )


def disk(state_dir: Path) -> Finding:
    """Room for images where Podman keeps them."""
    place = next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    remedy = (
        ""
        if free >= ENOUGH_DISK
        else "free some, or set POLARNODE_PODMAN_DIR to a folder on a larger disk (images take about 4 GB)"
    )
    return Finding(
        name="disk",
        ok=free >= ENOUGH_DISK,
        what=f"{free / (1 << 30):.0f} GiB free for images and containers at {place}",
        remedy=remedy,
    )


def recipes(config: NodeConfig) -> Finding:
    """The runtimes a harness can run in."""
    try:
        folder = Path(config.runtimes_dir) if config.runtimes_dir else default_runtimes_dir()
        return Finding(
            name="runtimes",
            ok=True,
            what=f"{_carried(read_recipes(folder, base=config.base_image))} in {folder}",
        )
    except ConfigError as error:
        return Finding(
            name="runtimes",
            ok=False,
            what=str(error),
            remedy="set POLARNODE_RUNTIMES_DIR to the folder runtimes/ of a checkout",
        )


def _carried(found: Recipes) -> str:
    """`base, pi (for pi)`: each recipe, and the harnesses it carries."""
    return ", ".join(
        recipe.name + (f" (for {', '.join(recipe.config.harnesses)})" if recipe.config.harnesses else "")
        for recipe in found.by_name.values()
    )


def judges(config: NodeConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Each judge, asked one small question in the form it is asked for verdicts. One that is silent keeps no
    node from starting.
    """
    for name, told in config.judges.items():
        yield trio.run(judge, name, told, environment)


async def judge(name: str, told: JudgeConfig, environment: Mapping[str, str]) -> Finding:
    """Whether it answers, in its form."""
    here, once = f"judge {name}", evolve(told, attempts=1, answer_s=min(told.answer_s, JUDGE_S))
    try:
        async with open_judges({name: once}, environment) as opened:
            answer = await opened(name).ask(PROBE)
            codec.structure(json_of(answer), dict[str, bool])
    except ConfigError as error:
        return Finding(
            name=here, ok=False, what=str(error), remedy=f"export {told.key_env}=… before the node starts"
        )
    except (EvaluatorError, Refused) as error:
        remedy = (
            f"sessions whose evaluator asks it will end without a reward: look at {told.base_url}, its key,"
            " its model and `structured`"
        )
        return Finding(name=here, ok=True, what=f"gives no answer in its form: {error}", remedy=remedy)
    return Finding(name=here, ok=True, what=f"{told.model} at {told.base_url} answers")


def model(path: Path, *, simulated: bool = False) -> Iterator[Finding | Table]:
    """Whether the checkpoint's tokenizer and template can be served token-faithfully, what it speaks, and
    what the audit found worth knowing.
    """
    try:
        loaded = load_model(path)
        if simulated:
            simulated_marks(loaded.family)
    except ModelError as error:
        yield Finding(
            name="model",
            ok=False,
            what=str(error),
            remedy="give --model another folder, or leave it out for the embedded model",
        )
        return
    known = "polarnode-tiny, embedded" if path == TINY_MODEL else str(path)
    size = loaded.tokenizer.vocab_size
    yield Finding(
        name="model",
        ok=True,
        what=f"{known}: family {loaded.family.name}, {size} ids; the template audit passes",
    )
    yield language(loaded)
    for note in loaded.notes:
        yield Finding(name="model", ok=True, what=note)
