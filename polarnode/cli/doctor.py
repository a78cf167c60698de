"""`polarnode doctor`: check whether a node can start on this machine, and describe the model it would serve.

It starts no engine and no container, and asks each configured judge one short question. Invariant: a finding
is not ok only if a node would not start with these settings; a finding that only costs speed is ok, with a
remedy. Each new tool-call syntax needs a description in `_SYNTAX_DESCRIPTIONS`.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import trio
from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polarnode.cli.doctor_cache import cache
from polarnode.cli.doctor_log import log_findings
from polarnode.cli.options import setting_names
from polarnode.cli.output import harmless, open_console
from polarnode.containers.container import MAX_TERMINALS, MIN_OPEN_FILES
from polarnode.containers.inside import USER_LIMITS
from polarnode.containers.probe import MachineFinding
from polarnode.core import codec
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.conversation import Conversation, Json, Message
from polarnode.core.errors import ConfigError, EvaluatorError, ModelError, PolarnodeError, Refused
from polarnode.core.ports import Question
from polarnode.core.task import RuntimeSpec
from polarnode.engine.external import KEY_VARIABLE, ServerUnreachable, UnfitServer, Wanted, connect
from polarnode.engine.settings import check
from polarnode.evaluators.judging import JudgeConfig, json_of
from polarnode.journal.values import TASK_DISK_FREE_BYTES
from polarnode.node.checks import requirements
from polarnode.node.config import TINY_MODEL, NodeConfig
from polarnode.node.config_sources import as_written
from polarnode.node.settings import simulated_marks, store_dir, teacher_settings
from polarnode.rollouts.judges import open_judges
from polarnode.tokens.families import CallSyntax, Family
from polarnode.tokens.template import LoadedModel, load_model

# ── model ─────────────────────────────────────────────────────────────────────

_SYNTAX_DESCRIPTIONS: Final[Mapping[CallSyntax, str]] = {
    "none": "none: the model cannot call tools",
    "json": 'JSON, {"name": …, "arguments": {…}}',
    "bare_json": 'the whole answer is JSON, {"name": …, "parameters": {…}}',
    "function_xml": "XML, <function=name><parameter=key>value</parameter></function>",
    "invoke_xml": 'XML, <invoke name="name"><parameter name="key">value</parameter></invoke>',
    "arg_xml": "name<arg_key>key</arg_key><arg_value>value</arg_value>",
    "fenced": "the word function, the name, and the arguments in a JSON code block",
    "separated": "the name, a separator and JSON arguments",
    "numbered": "functions.name:0 and JSON arguments",
    "braces": "call:name{key:value}",
    "harmony": "a message to functions.name with JSON arguments",
}
_THINKING_WORDS: Final = {True: "with thinking on", False: "with thinking off"}
_NEW_MESSAGES: Final = {
    "user": Message(role="user", text="x"),
    "tool": Message(role="tool", text="x", call_id="c"),
}
_REFUSED_WORDS: Final[Mapping[str, str]] = {
    "tools": "tools",
    "calls": "tool calls",
    "tool": "tool results",
    "late system": "system messages after the first user message",
    "two systems": "two system messages at the start",
    "several results": "results of several calls in one turn",
}


def language(model: LoadedModel) -> Table:
    """What the model's template and vocabulary can express, as a table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(model):
        table.add_row(name, Text(harmless(value)))
    return table


def rows(model: LoadedModel) -> Iterator[tuple[str, str]]:
    """The rows of the table: a property of the model and its value."""
    family, names = model.family, {number: text for text, number in model.tokenizer.control.items()}
    yield "family", family.name
    yield (
        "vocabulary",
        f"{model.tokenizer.vocab_size} ids, {len(names)} of them control tokens; {model.tokenizer.kind}",
    )
    yield "ends a turn", ", ".join(f"{names[token]} ({token})" for token in family.stop_ids)
    if family.turn_end is None:
        yield "", "no token of its own: the next header ends a turn, also one that was cut"
    yield "calls", _calls(family, names)
    yield "thinking", _thinking(model, names)
    if family.harmony is not None or family.think_open is not None:
        yield "earlier thinking", _earlier_thinking_text(model)
    limits = model.template.limits
    refused = [
        _REFUSED_WORDS.get(kind, kind)
        for kind in dict.fromkeys((*limits.sentences, *family.refuses))
        if kind not in limits.otherwise
    ]
    yield "refuses", ", ".join(refused) or "nothing: it takes tools and every role"


def _calls(family: Family, names: Mapping[int, str]) -> str:
    marks = [names[token] for token in (family.section_open, family.call_open) if token is not None]
    between = f", after {' '.join(marks)}" if marks and family.call_syntax != "none" else ""
    return _SYNTAX_DESCRIPTIONS[family.call_syntax] + between


def _thinking(model: LoadedModel, names: Mapping[int, str]) -> str:
    family = model.family
    if family.harmony is not None:
        return "messages in the analysis channel"
    if family.think_open is None or family.think_close is None:
        return "none: it has no thinking tokens"
    opened = {thinking: _opened(model, thinking) for thinking in (None, True, False)}
    parts = ["the prompt opens it" if opened[None] else "the model opens it"]
    parts += [
        f"{words} {'the prompt opens it' if opened[thinking] else 'it does not'}"
        for thinking, words in _THINKING_WORDS.items()
        if opened[thinking] != opened[None]
    ]
    return f"{names[family.think_open]} to {names[family.think_close]}; {', '.join(parts)}"


def _opened(model: LoadedModel, thinking: bool | None) -> bool:
    return model.template.opens_thinking(
        model.template.root(Conversation(messages=(Message(role="user", text="x"),), thinking=thinking))
    )


def _earlier_thinking_text(model: LoadedModel) -> str:
    """What the template does with the thinking of earlier turns before a user or tool message."""
    after = [role for role, new in _NEW_MESSAGES.items() if model.template.drops_thinking_before((new,))]
    dropped = (
        f"dropped by the template before {' and '.join(f'{role} messages' for role in after)}"
        if after
        else "kept by the template"
    )
    return f'{dropped}; sampled thinking is kept anyway, unless the task sets thinking = "template"'


# ── machine ───────────────────────────────────────────────────────────────────

# The seconds that a judge has for its answer to the probe. A server that is still loading its model takes
# longer.
JUDGE_TIMEOUT_S = 30.0
PROBE = Question(
    messages=({"role": "user", "content": 'Answer with the JSON object {"ready": true} and nothing else.'},),
    schema={
        "type": "object",
        "properties": {"ready": {"type": "boolean"}},
        "required": ["ready"],
        "additionalProperties": False,
    },
)
MIN_DISK_BYTES = 10 << 30  # bytes: four runtime images and their base are about 4 GB


def run_doctor(config: NodeConfig, *, as_json: bool = False) -> int:
    """Print each finding as it is made, or all as one JSON object; returns the exit code, 0 if a node can
    start here.
    """
    if as_json:
        return _examine_as_json(config)
    console, faults = open_console(), 0
    for finding in findings(config):
        if isinstance(finding, LoadedModel):
            console.print(language(finding))
            continue
        show(console, finding)
        faults += not finding.ok
    if faults:
        console.print(
            f"\n{faults} checks failed (✗): follow the arrows, then run polarnode doctor again",
            style="red",
        )
    else:
        console.print(
            f"\na node can start here; try: polarnode run {_engine_flags(config)} hello.toml (from the"
            " README)",
            style="green",
        )
    return int(faults > 0)


def _examine_as_json(config: NodeConfig) -> int:
    """`{"ready", "findings": [{"name", "ok", "what", "remedy"}], "model": {property: value}}`; `model` is
    empty where none was loaded.
    """
    found, properties = list[MachineFinding](), dict[str, Json]()
    for each in findings(config):
        if isinstance(each, LoadedModel):
            properties = {name or "note": value for name, value in rows(each)}
        else:
            found.append(each)
    ready = all(each.ok for each in found)
    every: list[Json] = [plain(each) for each in found]
    print(dump_json({"ready": ready, "findings": every, "model": properties}).decode())
    return int(not ready)


def _engine_flags(config: NodeConfig) -> str:
    if config.engine != "sglang":
        return f"--engine {config.engine}"
    return "--gpus 0" if config.gpus else "--cpu"


def findings(config: NodeConfig) -> Iterator[MachineFinding | LoadedModel]:
    """All findings, quick ones first, and the model. That takes seconds: its tokenizer is loaded, its
    template audited. A fault names settings as the command's user wrote them.
    """
    names = setting_names()
    for each in _raw_findings(config):
        if isinstance(each, MachineFinding) and not each.ok:
            yield evolve(each, what=as_written(each.what, names), remedy=as_written(each.remedy, names))
        else:
            yield each


def _raw_findings(config: NodeConfig) -> Iterator[MachineFinding | LoadedModel]:
    required = list(requirements(config))
    yield from required
    if config.log is not None:
        yield from log_findings(config.log)
    if config.runs_tasks:
        yield from kernel_findings(config)
        yield disk(store_dir(config))
    yield state_disk_finding(Path(config.state_dir))
    if config.engine == "simulated":
        yield simulated(config)
    elif config.engine_urls:
        yield from trio.run(servers, config)
    yield from cache(config)
    yield from judges(config, os.environ)
    yield from teachers(config)
    if all(each.ok for each in required if each.name == "model"):
        yield from model(Path(config.model), simulated=config.engine == "simulated")


def show(console: Console, finding: MachineFinding) -> None:
    """Print a finding on one line and its remedy, if any, on the next."""
    mark = Text("✓ ", style="green") if finding.ok else Text("✗ ", style="red")
    console.print(mark + Text(harmless(f"{finding.name}: {finding.what}")))
    if finding.remedy:
        console.print(Text(harmless(f"  → {finding.remedy}"), style="dim" if finding.ok else "yellow"))


def simulated(config: NodeConfig) -> MachineFinding:
    """The simulated engine: it starts on any machine, and its answers are random."""
    hosts, settings = max(1, len(config.gpus) // config.tp), config.simulated
    speed = f"{hosts} × {settings.max_running} requests at {settings.tokens_per_s:g} tokens/s"
    return MachineFinding(
        name="engine", ok=True, what=f"simulated: EVERY ANSWER IS RANDOM, no model is loaded; {speed}"
    )


async def servers(config: NodeConfig) -> list[MachineFinding]:
    """The servers of an external engine. A server that does not answer is ok, because a node waits for it;
    one that does not fit is not ok. Each server samples one token.
    """
    found = []
    for url in config.engine_urls:
        wanted = Wanted(url=url, vocab_size=0, context_length=config.context_length)
        async with connect(wanted, os.environ.get(KEY_VARIABLE)) as server:
            try:
                ready = await server.probe()
            except ServerUnreachable as error:
                remedy = "start it; a node that is started meanwhile waits for it"
                found.append(MachineFinding(name="engine", ok=True, what=str(error), remedy=remedy))
            except UnfitServer as error:
                found.append(
                    MachineFinding(name="engine", ok=False, what=str(error), remedy="see docs/engines.md")
                )
            else:
                weights = (
                    f"weights {ready.weight_version}" if ready.weight_version else "weights without a name"
                )
                what = f"{url}: SGLang {ready.sglang_version}, {ready.capacity} tokens a request, {weights}"
                found.append(MachineFinding(name="engine", ok=True, what=what))
    return found


def disk(state_dir: Path) -> MachineFinding:
    """Free space where Podman keeps images."""
    place = next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    remedy = (
        ""
        if free >= MIN_DISK_BYTES
        else "free space, or set POLARNODE_PODMAN_DIR to a folder on a larger disk (images take about 4 GB)"
    )
    return MachineFinding(
        name="disk",
        ok=free >= MIN_DISK_BYTES,
        what=f"{free / (1 << 30):.0f} GiB free for images and containers at {place}",
        remedy=remedy,
    )


def state_disk_finding(state_dir: Path) -> MachineFinding:
    """Whether the journal's disk has room for a task. A node whose disk is full or read-only takes no
    tasks.
    """
    place = next(folder for folder in (state_dir, *state_dir.absolute().parents) if folder.exists())
    free, read_only = shutil.disk_usage(place).free, os.statvfs(place).f_flag & os.ST_RDONLY
    ok = free >= TASK_DISK_FREE_BYTES and not read_only
    what = "read-only" if read_only else f"{free / (1 << 30):.1f} GiB free"
    return MachineFinding(
        name="state disk",
        ok=ok,
        what=f"{what} for the journal and the logs at {place}",
        remedy="" if ok else "free space, or set --state-dir to a folder on a larger disk: no task is taken",
    )


@frozen(kw_only=True)
class SharedResource:
    """A resource that the kernel counts for all containers together: the sysctl that limits it, how much one
    container may take, and how much the machine's own programs need.
    """

    name: str
    sysctl: str
    share: int
    kept: int


PIDS = RuntimeSpec().pids  # the limit of a task that sets none
SHARED_RESOURCES = (
    SharedResource(
        name="inotify instances",
        sysctl="fs.inotify.max_user_instances",
        share=USER_LIMITS["max_inotify_instances"],
        kept=128,  # the kernel's default, for root's own programs
    ),
    SharedResource(
        name="inotify watches",
        sysctl="fs.inotify.max_user_watches",
        share=USER_LIMITS["max_inotify_watches"],
        kept=8192,  # the kernel's least default
    ),
    # The kernel keeps `kernel.pty.reserve` of them for the machine itself.
    SharedResource(name="terminals", sysctl="kernel.pty.max", share=MAX_TERMINALS, kept=1024),
    SharedResource(name="process ids", sysctl="kernel.pid_max", share=PIDS, kept=4096),
    SharedResource(name="open files", sysctl="fs.file-max", share=PIDS * MIN_OPEN_FILES, kept=65536),
)


def kernel_findings(config: NodeConfig, sysctls: Path = Path("/proc/sys")) -> Iterator[MachineFinding]:
    """The kernel's limits, compared with what the containers of a full node may take together. One container
    alone never takes all; a node starts with any limits.
    """
    # A session has its own container and one for its evaluator; others are started in advance.
    containers, enough = 2 * config.run_limit + config.warm, True
    for each in SHARED_RESOURCES:
        limit = int((sysctls / each.sysctl.replace(".", "/")).read_text())
        needed = containers * each.share + each.kept
        if limit < needed:
            enough = False
            yield MachineFinding(
                name=each.name,
                ok=True,
                what=f"{limit} for the machine; {containers} containers at once may take {each.share} each",
                remedy=f"sysctl -w {each.sysctl}={_next_power_of_two(needed)}, and in /etc/sysctl.d for good",
            )
    if int((sysctls / "vm/nr_hugepages").read_text()) > 0:
        yield MachineFinding(
            name="huge pages",
            ok=True,
            what="reserved ones are not bounded by container: one session can take them all",
            remedy="sysctl -w vm.nr_hugepages=0, unless a program of this machine needs them",
        )
    pattern = (sysctls / "kernel/core_pattern").read_text().strip()
    if pattern.startswith("|") and int((sysctls / "kernel/core_pipe_limit").read_text()) == 0:
        yield MachineFinding(
            name="core dumps",
            ok=True,
            what=f"a session's crash may start {pattern[1:].partition(' ')[0]} as root, any number at once",
            remedy="sysctl -w kernel.core_pipe_limit=16, or kernel.core_pattern=core",
        )
    if enough:
        yield MachineFinding(
            name="kernel limits",
            ok=True,
            what=f"enough for {containers} containers at once (2 × run_limit + warm)",
        )


def _next_power_of_two(needed: int) -> int:
    """The next power of two."""
    return 1 << (needed - 1).bit_length()


def judges(config: NodeConfig, environment: Mapping[str, str]) -> Iterator[MachineFinding]:
    """Each judge, asked one short question in the form used for verdicts. A node starts without an answer."""
    for name, settings in config.judges.items():
        yield trio.run(judge, name, settings, environment)


async def judge(name: str, settings: JudgeConfig, environment: Mapping[str, str]) -> MachineFinding:
    """Whether a judge answers in the form it is asked for."""
    label, once = (
        f"judge {name}",
        evolve(settings, attempts=1, answer_s=min(settings.answer_s, JUDGE_TIMEOUT_S)),
    )
    try:
        async with open_judges({name: once}, environment) as opened:
            answer = await opened(name).ask(PROBE)
            codec.structure(json_of(answer), dict[str, bool])
    except ConfigError as error:
        return MachineFinding(
            name=label,
            ok=False,
            what=str(error),
            remedy=f"export {settings.key_env}=… before the node starts",
        )
    except (EvaluatorError, Refused) as error:
        remedy = (
            f"sessions whose evaluator asks it will end without a reward: check {settings.base_url}, its key,"
            " its model and `structured`"
        )
        return MachineFinding(
            name=label, ok=True, what=f"gives no answer in the requested form: {error}", remedy=remedy
        )
    return MachineFinding(name=label, ok=True, what=f"{settings.model} at {settings.base_url} answers")


def teachers(config: NodeConfig) -> Iterator[MachineFinding]:
    """Each teacher's checkpoint, whose vocabulary must be the policy's. No engine is started."""
    for name, settings in config.teachers.items():
        what, ok = "scores: its vocabulary is the policy's", True
        try:
            policy = load_model(Path(config.model))
            check(teacher_settings(name, settings, Path(config.state_dir), policy, Path(config.model)))
        except PolarnodeError as error:
            what, ok = str(error), False
        remedy = "" if ok else "see docs/teachers.md; a node does not start with it"
        yield MachineFinding(name=f"teacher {name}", ok=ok, what=what, remedy=remedy)


def model(path: Path, *, simulated: bool = False) -> Iterator[MachineFinding | LoadedModel]:
    """Whether the checkpoint's tokenizer and template keep tokens exact, both of them, and the notes of the
    audit.
    """
    try:
        loaded = load_model(path)
        if simulated:
            simulated_marks(loaded.family)
    except ModelError as error:
        yield MachineFinding(
            name="model",
            ok=False,
            what=str(error),
            remedy="give --model another folder, or omit it for the embedded model",
        )
        return
    label = "polarnode-tiny, embedded" if path == TINY_MODEL else str(path)
    size = loaded.tokenizer.vocab_size
    yield MachineFinding(
        name="model",
        ok=True,
        what=f"{label}: family {loaded.family.name}, {size} ids; the template audit passes",
    )
    yield loaded
    for note in loaded.notes:
        yield MachineFinding(name="model", ok=True, what=note)
