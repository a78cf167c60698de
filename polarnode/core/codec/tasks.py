"""Tasks from JSON and back, captures from JSON, and the rules beyond types: ranges, names, paths.

Each refusal names the field and what to write instead. A spec that passes here can start, unless the machine
itself lacks something. Unknown fields are refused, because a misspelt budget that is silently ignored costs a
night of GPU time. A new field with a range, a name or a path needs a rule here: (whether it holds, where,
what to write instead).
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Iterator, Mapping
from posixpath import normpath
from typing import NamedTuple

from polarnode.core.codec import limits
from polarnode.core.codec.json import child, plain, structure, subject
from polarnode.core.codec.limits import check_value, label_faults, url_fault
from polarnode.core.conversation import Json, Sampling
from polarnode.core.errors import Refused
from polarnode.core.task import (
    Budgets,
    CaptureEnd,
    CaptureSpec,
    CarrySpec,
    EvaluationSpec,
    EvaluatorSpec,
    FileSpec,
    ForkPolicy,
    ForkSpec,
    GroupSpec,
    HarnessSpec,
    McpServerSpec,
    PrepareStep,
    RuntimeSpec,
    SnapshotSpec,
    TaskSpec,
)


class Rule(NamedTuple):
    """A requirement on one field; `sentence` is a predicate for the field at `path`."""

    holds: bool
    path: str
    sentence: str


# A GRPO group has 8-64 samples, a pass@k study a thousand. More is a mistyped number that would fill the
# queue.
MAX_SAMPLES = 4096
# These bound the equal turns in a row: one turn is no repeat, and each is compared again at every call, which
# takes 4 ms for a thousand.
REPEATS = (2, 1_000)
MAX_RETRIES = 10  # more would hide a broken machine for hours
MAX_PARTS = 32  # evaluators of one session, which run one after another in one post budget
MAX_EVALUATED = 10_000  # sessions of one evaluation: a night's work, and a megabyte of ids
# MiB of one snapshot: a gigabyte takes the ten seconds that a call may be held (rollouts/snapshots.py)
MAX_SNAPSHOT_MB = 1024
SNAPSHOTS = 256  # of one session; each is a file of up to max_mb, and a group has many sessions
MAX_ENTROPY = 100  # in nats; the logarithm of a vocabulary's size is at most 13
MAX_TOP_LOGPROBS = 20  # the most alternatives for each token, as OpenAI and Google allow
# A name stands unescaped in a URL path, a container label and an SSE filter.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
# An image is an OCI reference or a folder of runtimes/, never an option or a path upwards.
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")
HEADER_NAME_PATTERN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")
VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORDS = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,256}")
IMPORT_PATH_PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# The name of a skill or an MCP server is part of a path, a TOML key and a tool's name.
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
HOST = re.compile(
    r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)
NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)  # the number of a turn or a lineage
# The name of an adapter is part of a path on every file system, and of a URL.
ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}|\d{1,10}")


def first_broken(rules: Iterable[Rule]) -> Rule | None:
    return next((rule for rule in rules if not rule.holds), None)


def task_rules(spec: TaskSpec) -> Iterator[Rule]:
    """All rules of a task, except those on the content of files."""
    yield Rule(bool(spec.instruction.strip()), "$.instruction", "is empty: say what the agent should do")
    yield Rule(
        "\0" not in spec.instruction,
        "$.instruction",
        "has a NUL character: it cannot be an argument of a program",
    )
    yield from _session_rules(spec)
    yield Rule(0 <= spec.priority <= 100, "$.priority", f"must be 0 to 100, not {spec.priority}")
    yield from _harness_rules(spec.harness)
    yield from _runtime_rules(spec.runtime)
    yield from _evaluator_rules(spec.evaluator)
    yield from _group_rules(spec.group, spec.num_samples)
    yield from _snapshot_rules(spec.snapshot_at, spec.runtime)
    if spec.fork is not None:
        yield from _fork_rules(spec.fork)
    if spec.group.fork is not None:
        yield from _fork_policy_rules(spec.group.fork, spec)
    if spec.callback_url is not None:
        yield from _url_rules(spec.callback_url, "$.callback_url")


def capture_rules(spec: CaptureSpec) -> Iterator[Rule]:
    """All rules of a capture."""
    yield from _session_rules(spec)
    within = f"must be 0 to num_samples - 1 ({spec.num_samples - 1}), not {spec.sample_index}"
    yield Rule(0 <= spec.sample_index < spec.num_samples, "$.sample_index", within)


def _session_rules(spec: TaskSpec | CaptureSpec) -> Iterator[Rule]:
    """The rules that tasks and captures share."""
    yield from _name_rules(spec.task_id, "$.task_id")
    yield from _name_rules(spec.group_id, "$.group_id")
    yield Rule(
        1 <= spec.num_samples <= MAX_SAMPLES,
        "$.num_samples",
        f"must be 1 to {MAX_SAMPLES}, not {spec.num_samples}",
    )
    yield from _import_rules(spec.builder.import_path, "$.builder.import_path")
    yield from _budget_rules(spec.budgets)
    yield from sampling_rules(spec.sampling, "$.sampling")
    yield from _carry_rules(spec.carry)
    yield from adapter_rules(spec.adapter, "$.adapter")
    yield from (Rule(False, *fault) for fault in label_faults(spec.requires, "$.requires"))


def capture_end_rules(end: CaptureEnd) -> Iterator[Rule]:
    """All rules of a capture's end, except those on the turns that it names."""
    yield Rule(
        end.reason is None or len(end.reason) <= limits.REASON_CHARS,
        "$.reason",
        f"must be at most {limits.REASON_CHARS} characters long: put more into metrics",
    )
    if end.reward is not None:
        yield _reward_rule(end.reward, "$.reward")
    for field, rewards in (("turn_rewards", end.turn_rewards), ("lineage_rewards", end.lineage_rewards)):
        yield Rule(
            not rewards or end.reward is not None,
            "$.reward",
            f"is missing: {field} stand beside the session's own",
        )
        for number, reward in rewards.items():
            where = child(f"$.{field}", number)
            yield Rule(NUMBER.fullmatch(number) is not None, where, 'must be named by a number, as "3"')
            yield _reward_rule(reward, where)


def _reward_rule(reward: float, path: str) -> Rule:
    most = limits.REWARD
    return Rule(-most <= reward <= most, path, f"must be a number from -{most:g} to {most:g}, not {reward}")


def _carry_rules(carry: CarrySpec) -> Iterator[Rule]:
    top = carry.top_logprobs
    yield Rule(
        0 <= top <= MAX_TOP_LOGPROBS, "$.carry.top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}, not {top}"
    )


def _snapshot_rules(spec: SnapshotSpec, runtime: RuntimeSpec) -> Iterator[Rule]:
    at, named = "$.snapshot_at", len(set(spec.turns))
    numbers = (
        *((f"turns[{index}]", turn, 0, limits.COUNT) for index, turn in enumerate(spec.turns)),
        *((f"tool_calls[{index}]", call, 1, limits.COUNT) for index, call in enumerate(spec.tool_calls)),
        ("every", spec.every, 1, limits.COUNT),
        ("entropy", spec.entropy, 0, MAX_ENTROPY),
        ("max_mb", spec.max_mb, 1, MAX_SNAPSHOT_MB),
        ("keep", spec.keep, 1, SNAPSHOTS),
    )
    for name, value, low, high in numbers:
        right = value is None or low <= value <= high
        yield Rule(right, f"{at}.{name}", f"must be {low} to {high}, not {value}")
    yield Rule(named <= spec.keep, f"{at}.turns", f"names {named} turns, and keep is {spec.keep}: raise keep")
    unasked = "keeps the processes of snapshots, and no rule asks for one: name turns"
    yield Rule(spec.wanted or not spec.freeze, f"{at}.freeze", unasked)
    if spec.wanted:
        sealed = runtime.read_only and all(normpath(place).strip("/") for place in runtime.writable)
        why = "has what is writable while the harness runs: leave read_only true, and name no / in writable"
        yield Rule(sealed, at, f"cannot keep a whole root; a snapshot {why}")
        written = next((volume.target for volume in runtime.volumes if volume.write), None)
        outside = f"cannot keep what is written to the volume {written}: set write = false there"
        yield Rule(written is None, at, outside)


def adapter_rules(name: str, path: str) -> Iterator[Rule]:
    sentence = "must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit"
    yield Rule(not name or ADAPTER.fullmatch(name) is not None, path, sentence)


def _group_rules(group: GroupSpec, num_samples: int) -> Iterator[Rule]:
    for name, count in (("early_stop_min", group.early_stop_min), ("min_usable", group.min_usable)):
        yield Rule(
            count is None or 1 <= count <= num_samples,
            f"$.group.{name}",
            f"must be 1 to num_samples ({num_samples}), not {count}",
        )
    behind = group.max_staleness
    yield Rule(
        behind is None or 0 <= behind <= limits.COUNT,
        "$.group.max_staleness",
        f"must be 0 to {limits.COUNT}, not {behind}",
    )


def _fork_rules(fork: ForkSpec) -> Iterator[Rule]:
    yield from _name_rules(fork.session, "$.fork.session")
    within = f"must be 0 to {limits.COUNT}, not {fork.turn}: it is the number of the first turn sampled anew"
    yield Rule(0 <= fork.turn <= limits.COUNT, "$.fork.turn", within)


def _fork_policy_rules(policy: ForkPolicy, spec: TaskSpec) -> Iterator[Rule]:
    at, each = "$.group.fork", policy.per_session
    yield Rule(
        spec.fork is None, at, "is for a task without fork: its own sessions are the roots of its forks"
    )
    yield Rule(1 <= each < MAX_SAMPLES, f"{at}.per_session", f"must be 1 to {MAX_SAMPLES - 1}, not {each}")
    if isinstance(policy.at, tuple):
        known = bool(policy.at) and all(1 <= turn <= limits.COUNT for turn in policy.at)
        why = "before turn 0 nothing is inherited, which is one more sample"
        yield Rule(known, f"{at}.at", f"must name turns from 1 to {limits.COUNT}: {why}")
    yield Rule(
        spec.num_samples % (1 + max(each, 1)) == 0,
        "$.num_samples",
        f"must be a multiple of {1 + each} (a root and its {each} forks, by group.fork), not"
        f" {spec.num_samples}",
    )


def _url_rules(url: str, path: str) -> Iterator[Rule]:
    fault = url_fault(url)
    yield Rule(fault is None, path, fault or "")


def _name_rules(name: str | None, path: str) -> Iterator[Rule]:
    sentence = "must be 1 to 128 letters, digits, '.', '_', ':' or '-', and begin with a letter or digit"
    yield Rule(name is None or NAME.fullmatch(name) is not None, path, sentence)


def _import_rules(name: str | None, path: str) -> Iterator[Rule]:
    yield Rule(
        name is None or IMPORT_PATH_PATTERN.fullmatch(name) is not None,
        path,
        "must look like package.module:attribute",
    )


def _evaluator_rules(spec: EvaluatorSpec) -> Iterator[Rule]:
    yield from _import_rules(spec.import_path, "$.evaluator.import_path")
    alone = spec.import_path is None and not spec.config and spec.name == EvaluatorSpec().name
    yield Rule(
        not spec.parts or alone,
        "$.evaluator",
        "has parts: give name, import_path and config in each part, not beside them",
    )
    yield Rule(
        len(spec.parts) <= MAX_PARTS,
        "$.evaluator.parts",
        f"must be at most {MAX_PARTS}, not {len(spec.parts)}",
    )
    for index, part in enumerate(spec.parts):
        yield from _import_rules(part.import_path, f"$.evaluator.parts[{index}].import_path")
        yield _reward_rule(part.weight, f"$.evaluator.parts[{index}].weight")


def _harness_rules(harness: HarnessSpec) -> Iterator[Rule]:
    yield Rule(bool(harness.name.strip()), "$.harness.name", "is empty: name a harness")
    for name, text in (("version", harness.version), ("model_name", harness.model_name)):
        yield Rule(
            text is None or WORDS.fullmatch(text) is not None,
            f"$.harness.{name}",
            "must be 1 to 256 printable characters: it becomes an argument, a setting or a label",
        )
    yield from _import_rules(harness.import_path, "$.harness.import_path")
    needs = harness.name == "shell" and harness.import_path is None
    yield Rule(
        not needs or harness.command is not None,
        "$.harness.command",
        "is missing: the harness shell runs a command, given as argv",
    )
    if harness.command is not None:
        yield from _argv_rules(harness.command, "$.harness.command")
    yield from _env_rules(harness.env, "$.harness.env")
    for name, server in harness.mcp_servers.items():
        where = child("$.harness.mcp_servers", name)
        yield from _folder_rules(name, where)
        yield from _server_rules(server, where)
    for name, text in harness.skills.items():
        where = child("$.harness.skills", name)
        yield from _folder_rules(name, where)
        yield Rule(bool(text.strip()), where, "is empty: give the text of its SKILL.md")


def _folder_rules(name: str, path: str) -> Iterator[Rule]:
    yield Rule(
        FOLDER.fullmatch(name) is not None,
        path,
        "needs a name of 1 to 64 letters, digits, '_' or '-', beginning with a letter or digit",
    )


def _server_rules(server: McpServerSpec, path: str) -> Iterator[Rule]:
    yield Rule((server.command is None) != (server.url is None), path, "needs exactly one of command and url")
    yield Rule(
        server.command is not None or not (server.args or server.env),
        path,
        "has args or env without a command to start",
    )
    yield Rule(server.url is not None or not server.headers, f"{path}.headers", "are for a server with a url")
    if server.command is not None:
        yield from _argv_rules((server.command, *server.args), f"{path}.command")
    yield from _env_rules(server.env, f"{path}.env")
    if server.url is not None:
        yield from _url_rules(server.url, f"{path}.url")
    for name, value in server.headers.items():
        fits = HEADER_NAME_PATTERN.fullmatch(name) is not None and limits.HEADER.fullmatch(value) is not None
        yield Rule(
            fits,
            child(f"{path}.headers", name),
            "is no HTTP header: a name has letters, digits and '-', a value no line breaks or other controls",
        )


def _argv_rules(argv: tuple[str, ...], path: str) -> Iterator[Rule]:
    yield Rule(bool(argv) and bool(argv[0]), path, "is empty: give the program and its arguments")
    yield Rule(not any("\0" in word for word in argv), path, "has a NUL character: no program takes one")


def _env_rules(env: Mapping[str, str], path: str) -> Iterator[Rule]:
    for name, value in env.items():
        where = child(path, name)
        yield Rule(
            VARIABLE_PATTERN.fullmatch(name) is not None,
            where,
            "is not a variable's name: use letters, digits and '_'",
        )
        yield Rule("\0" not in value, where, "has a NUL character: no environment takes one")


def _runtime_rules(runtime: RuntimeSpec) -> Iterator[Rule]:
    image_ok = (
        IMAGE.fullmatch(runtime.image) is not None and ".." not in runtime.image and "//" not in runtime.image
    )
    yield Rule(
        image_ok,
        "$.runtime.image",
        "is not an image's name: use a folder of runtimes/ or a reference like localhost/agent:1",
    )
    yield Rule(
        runtime.workdir.startswith("/"),
        "$.runtime.workdir",
        f"must be an absolute path, not {runtime.workdir!r}",
    )
    yield from _path_rules(runtime.workdir, "$.runtime.workdir")
    yield Rule(USER.fullmatch(runtime.user) is not None, "$.runtime.user", "must be a user's name or number")
    yield from _resource_rules(runtime)
    yield from _env_rules(runtime.env, "$.runtime.env")
    yield from _reach_rules(runtime)
    for index, file in enumerate(runtime.files):
        yield from _file_rules(file, f"$.runtime.files[{index}]")
    for name, steps in (("prepare", runtime.prepare), ("eval_prepare", runtime.eval_prepare)):
        for index, step in enumerate(steps):
            yield from _step_rules(step, f"$.runtime.{name}[{index}]")


def _resource_rules(runtime: RuntimeSpec) -> Iterator[Rule]:
    """The rules on what a container gets of the machine. A shell does not start in less than 16 MiB."""
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("cpus", runtime.cpus, *limits.CPUS),
        ("memory_mb", runtime.memory_mb, 16, limits.MAX_MEBIBYTES),
        ("pids", runtime.pids, 1, limits.PIDS),
        ("disk_mb", runtime.disk_mb, 16, limits.MAX_MEBIBYTES),
    )
    for name, value, low, high in ranges:
        yield Rule(low <= value <= high, f"$.runtime.{name}", f"must be {low} to {high}, not {value}")


def _reach_rules(runtime: RuntimeSpec) -> Iterator[Rule]:
    """The rules on what a container can reach: volumes, hosts, servers."""
    for index, name in enumerate(runtime.egress):
        named = HOST.fullmatch(name) is not None
        yield Rule(
            named,
            f"$.runtime.egress[{index}]",
            "must be a host's name such as pypi.example or *.pypi.example, without scheme, port and path",
        )
    for index, place in enumerate(runtime.writable):
        yield from _absolute_rules(place, f"$.runtime.writable[{index}]")
    for index, volume in enumerate(runtime.volumes):
        yield from _absolute_rules(volume.source, f"$.runtime.volumes[{index}].source")
        yield from _absolute_rules(volume.target, f"$.runtime.volumes[{index}].target")
        yield Rule(
            volume.target.strip("/") != "", f"$.runtime.volumes[{index}].target", "must not be the root"
        )
    for index, artifact in enumerate(runtime.artifacts):
        yield Rule(bool(artifact.strip("/")), f"$.runtime.artifacts[{index}]", "must name a file or a folder")
        yield from _path_rules(artifact, f"$.runtime.artifacts[{index}]")


def _absolute_rules(place: str, path: str) -> Iterator[Rule]:
    yield Rule(place.startswith("/"), path, f"must be an absolute path, not {place!r}")
    yield from _path_rules(place, path)


def _path_rules(name: str, path: str) -> Iterator[Rule]:
    yield Rule(".." not in name.split("/"), path, "must not climb with '..': write the path it means")
    yield Rule("\0" not in name, path, "has a NUL character: no file system takes one")


def _file_rules(file: FileSpec, path: str) -> Iterator[Rule]:
    named = bool(file.path.strip("/")) and not file.path.endswith("/")
    yield Rule(named, f"{path}.path", "must name a file, relative to the workdir or absolute")
    yield from _path_rules(file.path, f"{path}.path")
    yield Rule(0 <= file.mode <= 0o777, f"{path}.mode", "must be permission bits, 0 to 511 (0o777)")


def _step_rules(step: PrepareStep, path: str) -> Iterator[Rule]:
    yield from _argv_rules(step.argv, f"{path}.argv")
    yield Rule(
        step.user is None or USER.fullmatch(step.user) is not None,
        f"{path}.user",
        "must be a user's name or number",
    )


def _budget_rules(budgets: Budgets) -> Iterator[Rule]:
    for name, seconds in (("init_s", budgets.init_s), ("run_s", budgets.run_s), ("post_s", budgets.post_s)):
        yield Rule(
            0 < seconds <= limits.SECONDS,
            f"$.budgets.{name}",
            f"must be more than 0 seconds and at most {limits.SECONDS:.0f} (30 days), not {seconds}",
        )
    for name, count, least, most in (
        ("max_turns", budgets.max_turns, 1, limits.COUNT),
        ("max_tokens", budgets.max_tokens, 1, limits.COUNT),
        ("max_repeats", budgets.max_repeats, *REPEATS),
    ):
        right = count is None or least <= count <= most
        yield Rule(right, f"$.budgets.{name}", f"must be {least} to {most}, not {count}")
    yield Rule(
        0 <= budgets.retries <= MAX_RETRIES,
        "$.budgets.retries",
        f"must be 0 to {MAX_RETRIES}, not {budgets.retries}",
    )


def sampling_rules(sampling: Sampling, path: str) -> Iterator[Rule]:
    """The ranges that the engine accepts; also used for a provider's request, with a path of its own."""
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, *limits.REPETITION_RANGE),
    )
    for name, value, low, high in ranges:
        yield Rule(
            value is None or low <= value <= high,
            f"{path}.{name}",
            f"must be {low:g} to {high:g}, not {value}",
        )
    top_p, top_k = sampling.top_p, sampling.top_k
    yield Rule(
        top_p is None or 0 < top_p <= 1, f"{path}.top_p", f"must be more than 0 and at most 1, not {top_p}"
    )
    yield Rule(
        top_k is None or top_k == -1 or 1 <= top_k <= limits.COUNT,
        f"{path}.top_k",
        f"must be 1 to {limits.COUNT}, or -1 for all, not {top_k}",
    )
    yield Rule(
        sampling.max_tokens is None or 1 <= sampling.max_tokens <= limits.COUNT,
        f"{path}.max_tokens",
        f"must be 1 to {limits.COUNT}, not {sampling.max_tokens}",
    )
    yield Rule(
        sampling.seed is None or -limits.SEED <= sampling.seed <= limits.SEED,
        f"{path}.seed",
        f"must be {-limits.SEED} to {limits.SEED}, not {sampling.seed}",
    )
    yield Rule(
        len(sampling.stop) <= limits.STOPS
        and all(len(each) <= limits.MAX_STOP_CHARS for each in sampling.stop),
        f"{path}.stop",
        f"must be at most {limits.STOPS} strings of at most {limits.MAX_STOP_CHARS} characters",
    )
    yield Rule(
        all(sampling.stop), f"{path}.stop", "has an empty string: it would stop before the first token"
    )


def read_task(value: Json) -> TaskSpec:
    """Read a TaskSpec from JSON; absent fields take their defaults. Raises Refused with the path of the first
    invalid field.
    """
    spec = structure(value, TaskSpec, forbid_extra=True)
    _hold(_all_rules(spec))
    check_value(spec.harness.settings, "$.harness.settings")
    _check_configs(spec.evaluator)
    check_value(spec.builder.config, "$.builder.config")
    check_value(spec.metadata, "$.metadata")
    return spec


def _check_configs(spec: EvaluatorSpec) -> None:
    check_value(spec.config, "$.evaluator.config", limits.CONFIG)
    for index, part in enumerate(spec.parts):
        check_value(part.config, f"$.evaluator.parts[{index}].config", limits.CONFIG)


def read_evaluation(value: Json) -> EvaluationSpec:
    """Read an evaluation of finished sessions from JSON. Raises Refused as `read_task`."""
    spec = structure(value, EvaluationSpec, forbid_extra=True)
    named = [bool(spec.sessions), spec.task_id is not None, spec.group_id is not None]
    few = f"must be at most {MAX_EVALUATED}, not {len(spec.sessions)}: send the others in another request"
    long = f"must be at most {limits.REASON_CHARS} characters long"
    evaluator = spec.evaluator or EvaluatorSpec()
    _hold(
        [
            Rule(sum(named) == 1, "$", "needs exactly one of sessions, task_id and group_id"),
            Rule(len(spec.sessions) <= MAX_EVALUATED, "$.sessions", few),
            Rule(len(spec.reason or "") <= limits.REASON_CHARS, "$.reason", long),
            *_evaluator_rules(evaluator),
        ]
    )
    _check_configs(evaluator)
    return spec


def read_capture(value: Json) -> CaptureSpec:
    """Read a CaptureSpec from JSON. Raises Refused as `read_task`."""
    spec = structure(value, CaptureSpec, forbid_extra=True)
    _hold(capture_rules(spec))
    check_value(spec.builder.config, "$.builder.config")
    check_value(spec.metadata, "$.metadata")
    return spec


def read_capture_end(value: Json) -> CaptureEnd:
    """Read the end of a capture from JSON. Raises Refused as `read_task`."""
    end = structure(value, CaptureEnd, forbid_extra=True)
    _hold(capture_end_rules(end))
    check_value(end.metrics, "$.metrics")
    return end


def _hold(rules: Iterable[Rule]) -> None:
    broken = first_broken(rules)
    if broken is not None:
        raise Refused(f"{subject(broken.path)} {broken.sentence}", path=broken.path)


def _all_rules(spec: TaskSpec) -> Iterator[Rule]:
    yield from task_rules(spec)
    for index, file in enumerate(spec.runtime.files):
        yield from _content_rules(file, f"$.runtime.files[{index}]")


def _content_rules(file: FileSpec, path: str) -> Iterator[Rule]:
    yield Rule((file.text is None) != (file.base64 is None), path, "needs exactly one of text and base64")
    yield Rule(
        _is_base64(file.base64),
        f"{path}.base64",
        "is not base64: encode the bytes with the standard alphabet and padding",
    )


def _is_base64(text: str | None) -> bool:
    try:
        return text is None or b64decode(text, validate=True) is not None
    except (Base64Error, ValueError):
        return False


def file_bytes(file: FileSpec) -> bytes:
    """The content of a file that `read_task` accepted."""
    return (file.text or "").encode() if file.base64 is None else b64decode(file.base64, validate=True)


def in_workdir(path: str, workdir: str) -> str:
    """Make a path absolute: a relative one is below the workdir."""
    return path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"


def task_json(spec: TaskSpec) -> dict[str, Json]:
    """Write `spec` as JSON with every default; `read_task` of it equals `spec`."""
    found: dict[str, Json] = plain(spec)
    return found
