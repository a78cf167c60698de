"""Tasks from JSON and TOML: what is read, what is refused and where."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.core.codec import dump_json, read_json
from polarnode.core.codec.limits import MAX_LABELS
from polarnode.core.codec.task_toml import read_toml_value
from polarnode.core.codec.tasks import (
    file_bytes,
    first_broken,
    read_capture,
    read_task,
    sampling_rules,
    task_json,
)
from polarnode.core.conversation import Json, Sampling
from polarnode.core.errors import Refused
from polarnode.core.task import (
    Budgets,
    CarrySpec,
    FileSpec,
    HarnessSpec,
    PrepareStep,
    RuntimeSpec,
    SnapshotSpec,
    TaskSpec,
)

LEAST: dict[str, Json] = {"instruction": "fix the bug", "harness": {"name": "pi"}}


def test_minimal_task_has_every_default() -> None:
    assert read_task(LEAST) == TaskSpec(instruction="fix the bug", harness=HarnessSpec(name="pi"))


def test_whole_task_is_read() -> None:
    spec = read_task(
        {
            "task_id": "t-1",
            "group_id": "g:1",
            "instruction": "do it",
            "num_samples": 8,
            "priority": 100,
            "harness": {
                "name": "shell",
                "command": ["sh", "-c", "true"],
                "settings": {"deep": [{"x": None}]},
                "env": {"A_B": ""},
            },
            "runtime": {
                "image": "localhost/agent:1",
                "files": [{"path": "a/b", "base64": "AAE=", "mode": 493}],
                "prepare": [{"argv": ["ls"], "user": "root"}],
                "cpus": 2,
            },
            "budgets": {"run_s": 5, "max_turns": 3},
            "sampling": {"temperature": 1, "top_k": -1, "stop": ["END"]},
            "evaluator": {"import_path": "my.module:judge", "fresh_runtime": True},
            "metadata": {"anything": [1, {"b": True}]},
        }
    )
    assert spec.harness.command == ("sh", "-c", "true")
    assert spec.runtime == RuntimeSpec(
        image="localhost/agent:1",
        files=(FileSpec(path="a/b", base64="AAE=", mode=0o755),),
        prepare=(PrepareStep(argv=("ls",), user="root"),),
        cpus=2.0,
    )
    assert file_bytes(spec.runtime.files[0]) == b"\x00\x01"
    assert spec.budgets == Budgets(run_s=5.0, max_turns=3)
    assert spec.sampling == Sampling(temperature=1.0, top_k=-1, stop=("END",))
    assert spec.metadata == {"anything": [1, {"b": True}]}


def place(fields: dict[str, Any], path: str, value: Any) -> dict[str, Json]:
    """`fields` with `value` at a dotted path, folders made on the way."""
    head, _, rest = path.partition(".")
    inner: Any = fields.get(head, {})
    return {**fields, head: place(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


@pytest.mark.parametrize(
    ("at", "value", "path", "words"),
    [
        ("instruction", "  \n", "$.instruction", "say what the agent should do"),
        ("instruction", "a\0b", "$.instruction", "NUL"),
        ("num_samples", 0, "$.num_samples", "1 to 4096, not 0"),
        ("num_samples", 4097, "$.num_samples", "1 to 4096"),
        ("num_samples", 1.5, "$.num_samples", "whole number"),
        ("priority", 101, "$.priority", "0 to 100"),
        ("priority", -1, "$.priority", "0 to 100"),
        ("task_id", "", "$.task_id", "letters"),
        ("task_id", "a/b", "$.task_id", "letters"),
        ("group_id", "-x", "$.group_id", "begin with"),
        ("fork", {"turn": 1}, "$.fork.session", "missing"),
        ("fork", {"session": "s"}, "$.fork.turn", "missing"),
        ("fork", {"session": "a b", "turn": 1}, "$.fork.session", "letters"),
        ("fork", {"session": "s", "turn": -1}, "$.fork.turn", "first turn sampled anew"),
        ("fork", {"session": "s", "turn": 1, "by": "hope"}, "$.fork.by", "resume"),
        ("group.fork", {"at": "best"}, "$.group.fork.at", "must be one of 'even', 'entropy'"),
        ("group.fork", {"at": []}, "$.group.fork.at", "must name turns from 1"),
        ("group.fork", {"at": [2, 0]}, "$.group.fork.at", "before turn 0 nothing is inherited"),
        ("group.fork", {"per_session": 0}, "$.group.fork.per_session", "must be 1 to 4095, not 0"),
        ("group.fork", {"per_session": 2}, "$.num_samples", "must be a multiple of 3"),
        ("group.fork", {"by": "magic"}, "$.group.fork.by", "resume"),
        ("nun_samples", 3, "$.nun_samples", "did you mean num_samples?"),
        ("budgets.run", 3, "$.budgets.run", "did you mean run_s?"),
        ("harness.mcp_servers", {"a b": {"command": "x"}}, "$.harness.mcp_servers['a b']", "letters, digits"),
        ("harness.mcp_servers", {"w": {}}, "$.harness.mcp_servers.w", "exactly one of command and url"),
        (
            "harness.mcp_servers",
            {"w": {"command": "x", "url": "http://a"}},
            "$.harness.mcp_servers.w",
            "exactly one of command and url",
        ),
        (
            "harness.mcp_servers",
            {"w": {"url": "http://a", "args": ["x"]}},
            "$.harness.mcp_servers.w",
            "without a command",
        ),
        (
            "harness.mcp_servers",
            {"w": {"command": "x", "headers": {"a": "b"}}},
            "$.harness.mcp_servers.w.headers",
            "a server with a url",
        ),
        (
            "harness.mcp_servers",
            {"w": {"command": "x", "args": ["a\0"]}},
            "$.harness.mcp_servers.w.command",
            "NUL",
        ),
        (
            "harness.mcp_servers",
            {"w": {"command": "x", "env": {"1": ""}}},
            "$.harness.mcp_servers.w.env['1']",
            "variable's name",
        ),
        (
            "harness.mcp_servers",
            {"w": {"url": "ftp://a"}},
            "$.harness.mcp_servers.w.url",
            "must be an http or https address",
        ),
        (
            "harness.mcp_servers",
            {"w": {"comand": "x"}},
            "$.harness.mcp_servers.w.comand",
            "did you mean command?",
        ),
        ("harness.skills", {"../up": "text"}, "$.harness.skills['../up']", "letters, digits"),
        ("harness.skills", {"kiwi": " "}, "$.harness.skills.kiwi", "SKILL.md"),
        ("budgets.run_s", 0, "$.budgets.run_s", "more than 0 seconds"),
        ("budgets.max_turns", 0, "$.budgets.max_turns", "1 to 2147483647"),
        ("budgets.max_repeats", 1, "$.budgets.max_repeats", "must be 2 to 1000, not 1"),
        ("budgets.max_repeats", 1001, "$.budgets.max_repeats", "2 to 1000"),
        ("budgets.max_repeats", "3", "$.budgets.max_repeats", "must be"),
        ("budgets.max_tokens", -5, "$.budgets.max_tokens", "1 to 2147483647"),
        ("harness", {"name": "shell"}, "$.harness.command", "argv"),
        ("harness", {"name": "shell", "command": []}, "$.harness.command", "is empty"),
        (
            "harness",
            {"name": "shell", "command": "ls -l"},
            "$.harness.command",
            "must be a list or null, not a string",
        ),
        ("harness", {"name": ""}, "$.harness.name", "name a harness"),
        ("harness.env", {"A-B": "1"}, "$.harness.env.A-B", "variable's name"),
        ("harness.env", {"A": 1}, "$.harness.env.A", "must be a string"),
        ("harness.import_path", "nope", "$.harness.import_path", "package.module:attribute"),
        ("evaluator.import_path", "a.b:c d", "$.evaluator.import_path", "package.module:attribute"),
        ("runtime.image", "--privileged", "$.runtime.image", "not an image's name"),
        ("runtime.image", "../agent", "$.runtime.image", "not an image's name"),
        ("runtime.workdir", "work", "$.runtime.workdir", "absolute"),
        ("runtime.workdir", "/a/../b", "$.runtime.workdir", "'..'"),
        ("runtime.user", "a b", "$.runtime.user", "user's name"),
        ("runtime.cpus", 0, "$.runtime.cpus", "must be 0.01 to 4096"),
        ("runtime.memory_mb", 1, "$.runtime.memory_mb", "must be 16 to 16777216"),
        ("runtime.pids", 0, "$.runtime.pids", "must be 1 to 4194304"),
        ("runtime.network", "host", "$.runtime.network", "must be 'none', not 'host'"),
        ("runtime.files", [{"path": "a"}], "$.runtime.files[0]", "exactly one of text and base64"),
        ("runtime.files", [{"path": "a", "text": "", "base64": ""}], "$.runtime.files[0]", "exactly one"),
        (
            "runtime.files",
            [{"path": "a", "text": ""}, {"path": "b", "base64": "?"}],
            "$.runtime.files[1].base64",
            "not base64",
        ),
        ("runtime.files", [{"path": "a/../../etc/passwd", "text": ""}], "$.runtime.files[0].path", "'..'"),
        ("runtime.files", [{"path": "a/", "text": ""}], "$.runtime.files[0].path", "name a file"),
        (
            "runtime.files",
            [{"path": "a", "text": "", "mode": 4096}],
            "$.runtime.files[0].mode",
            "permission bits",
        ),
        ("runtime.prepare", [{"argv": []}], "$.runtime.prepare[0].argv", "is empty"),
        ("runtime.eval_prepare", [{"argv": ["a\0"]}], "$.runtime.eval_prepare[0].argv", "NUL"),
        ("carry.top_logprobs", -1, "$.carry.top_logprobs", "0 to 20, not -1"),
        ("carry.top_logprobs", 21, "$.carry.top_logprobs", "0 to 20, not 21"),
        ("carry.routed_experts", 1, "$.carry.routed_experts", "true or false"),
        ("carry.routed_expert", True, "$.carry.routed_expert", "did you mean routed_experts?"),
        ("snapshot_at", 3, "$.snapshot_at", "must be a list of turns or an object, not a number"),
        ("snapshot_at", [0, -1], "$.snapshot_at.turns[1]", "0 to 2147483647, not -1"),
        ("snapshot_at.tool_calls", [0], "$.snapshot_at.tool_calls[0]", "must be 1 to"),
        ("snapshot_at.every", 0, "$.snapshot_at.every", "must be 1 to"),
        ("snapshot_at.entropy", -0.5, "$.snapshot_at.entropy", "0 to 100, not -0.5"),
        ("snapshot_at.max_mb", 2000, "$.snapshot_at.max_mb", "1 to 1024, not 2000"),
        ("snapshot_at.keep", 0, "$.snapshot_at.keep", "1 to 256"),
        ("snapshot_at", {"turns": [1, 2], "keep": 1}, "$.snapshot_at.turns", "names 2 turns, and keep is 1"),
        ("sampling.temperature", -0.1, "$.sampling.temperature", "0 to 100"),
        ("sampling.top_p", 0, "$.sampling.top_p", "at most 1"),
        ("sampling.top_k", 0, "$.sampling.top_k", "-1 for all"),
        ("sampling.max_tokens", 0, "$.sampling.max_tokens", "1 to 2147483647"),
        ("sampling.repetition_penalty", 1e-300, "$.sampling.repetition_penalty", "0.01 to 2"),
        ("sampling.stop", [""], "$.sampling.stop", "empty string"),
    ],
)
def test_impossible_value_refused_with_path(at: str, value: Any, path: str, words: str) -> None:
    """An impossible value is refused where it stands."""
    with pytest.raises(Refused) as caught:
        read_task(place(LEAST, at, value))
    assert caught.value.path == path
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ({"read_only": False}, "leave read_only true"),
        ({"writable": ["/srv", "//"]}, "name no / in writable"),
        ({"volumes": [{"source": "/a", "target": "/data", "write": True}]}, "the volume /data: set write ="),
    ],
)
def test_snapshot_without_archive_is_refused(runtime: dict[str, Json], words: str) -> None:
    """A snapshot of a folder that no archive holds is refused."""
    task = LEAST | {"runtime": runtime}
    assert not read_task(task).snapshot_at.wanted
    with pytest.raises(Refused, match=words) as caught:
        read_task(task | {"snapshot_at": [1]})
    assert caught.value.path == "$.snapshot_at"


def test_snapshot_list_means_turns() -> None:
    """A list is short for the turns of snapshots."""
    spec = read_task(LEAST | {"snapshot_at": [3, 0]}).snapshot_at
    assert spec == SnapshotSpec(turns=(3, 0))
    assert (spec.wanted, spec.is_provisional) == (True, False)
    assert not SnapshotSpec().wanted
    assert SnapshotSpec(every=2).wanted
    for rule in (SnapshotSpec(entropy=0.0), SnapshotSpec(tool_calls=(1,))):
        assert (rule.wanted, rule.is_provisional) == (True, True)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip)
FILES = st.builds(
    FileSpec, path=st.just("a/b.txt"), text=st.text(st.characters(codec="utf-8")), mode=st.integers(0, 0o777)
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(1, 100),
    stop=st.lists(TEXTS, max_size=2).map(tuple),
)
SPECS = st.builds(
    TaskSpec,
    snapshot_at=st.builds(SnapshotSpec, turns=st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    instruction=TEXTS,
    task_id=st.none() | NAMES,
    num_samples=st.integers(1, 4096),
    carry=st.builds(CarrySpec, top_logprobs=st.integers(0, 20), routed_experts=st.booleans()),
    priority=st.integers(0, 100),
    harness=st.builds(
        HarnessSpec,
        name=st.just("shell"),
        command=st.lists(TEXTS, min_size=1, max_size=3).map(tuple),
        env=st.dictionaries(st.just("A"), TEXTS),
    ),
    runtime=st.builds(RuntimeSpec, files=st.lists(FILES, max_size=2).map(tuple), cpus=st.floats(0.1, 64)),
    sampling=SAMPLINGS,
    metadata=st.dictionaries(TEXTS, st.none() | st.integers(-5, 5) | st.lists(TEXTS, max_size=2)),
)


@given(SPECS)
def test_a_task_goes_round(spec: TaskSpec) -> None:
    assert read_task(read_json(dump_json(task_json(spec)))) == spec


def test_sampling_ranges_are_same_everywhere() -> None:
    assert first_broken(sampling_rules(Sampling(), "$")) is None
    broken = first_broken(sampling_rules(Sampling(top_p=2.0), "$.generationConfig"))
    assert broken is not None
    assert broken.path == "$.generationConfig.top_p"


TOML = """
instruction_file = "task.md"
num_samples = 4
[harness]
name = "pi"
[budgets]
run_s = 60
[[runtime.files]]
path = "tests/x.bin"
source = "x.bin"
mode = 0o755
[[runtime.files]]
path = "plain"
text = "as it stands"
"""


def test_folder_is_read_as_task() -> None:
    files = {"task.md": "füge hinzu".encode(), "x.bin": b"\x00\xff"}
    spec = read_task(read_toml_value(TOML, read_file=files.__getitem__))
    assert (spec.instruction, spec.num_samples, spec.budgets.run_s) == ("füge hinzu", 4, 60.0)
    assert [file_bytes(file) for file in spec.runtime.files] == [b"\x00\xff", b"as it stands"]
    assert spec.runtime.files[0].mode == 0o755


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("instruction = ", None, "not TOML"),
        (
            'instruction = "x"\nharness.name = "pi"\nmetadata.when = 2026-01-01',
            "$.metadata.when",
            "TOML date",
        ),
        (
            'instruction = "x"\nharness.name = "pi"\nmetadata.when = [2026-01-01T00:00:00Z]',
            "$.metadata.when[0]",
            "TOML date",
        ),
        ('instruction_file = 3\nharness.name = "pi"', "$.instruction_file", "file's path"),
        ('instruction_file = "bin"\nharness.name = "pi"', "$.instruction_file", "not UTF-8"),
        (
            'instruction = "x"\nharness.name = "pi"\nruntime.files = [{path = "a", source = 1}]',
            "$.runtime.files[0].source",
            "file's path",
        ),
    ],
)
def test_non_task_toml_is_refused(text: str, path: str | None, words: str) -> None:
    with pytest.raises(Refused) as caught:
        read_task(read_toml_value(text, read_file={"bin": b"\xff"}.__getitem__))
    assert caught.value.path == path
    assert words in str(caught.value)


def test_files_unknown_without_reader() -> None:
    """Without a reader, files are unknown fields."""
    with pytest.raises(Refused, match="instruction_file is not a known field: did you mean instruction"):
        read_task(read_toml_value(TOML))


@pytest.mark.parametrize("policy", ["keep", "template"])
def test_task_sets_thinking_policy(policy: str) -> None:
    """A task says what a prompt shows of thoughts."""
    assert read_task(LEAST).thinking == "keep"
    assert read_task({**LEAST, "thinking": policy}).thinking == policy
    assert task_json(read_task({**LEAST, "thinking": policy}))["thinking"] == policy
    assert (
        read_task(
            read_toml_value(f'instruction = "x"\nthinking = "{policy}"\n[harness]\nname = "pi"')
        ).thinking
        == policy
    )


@pytest.mark.parametrize("policy", ["drop", "", None, True])
def test_unknown_thinking_policy_is_refused(policy: Json) -> None:
    with pytest.raises(Refused) as refused:
        read_task({**LEAST, "thinking": policy})
    assert refused.value.path == "$.thinking"


def test_required_labels_are_short_texts() -> None:
    spec = read_task({**LEAST, "requires": {"gpu": "h100", "model": "Qwen3 8B"}})
    assert spec.requires == {"gpu": "h100", "model": "Qwen3 8B"}
    assert task_json(spec)["requires"] == {"gpu": "h100", "model": "Qwen3 8B"}
    assert read_capture({"requires": {"gpu": "h100"}}).requires == {"gpu": "h100"}
    for bad, path in (
        ({"gpu": ""}, "$.requires.gpu"),
        ({"gpu": 8}, "$.requires.gpu"),
        ({"gpu": "a\nb"}, "$.requires.gpu"),
        ({"gpu": "a" * 257}, "$.requires.gpu"),
        ({"g" * 64: "a"}, f"$.requires.{'g' * 64}"),
        ({f"l{each}": "1" for each in range(MAX_LABELS + 1)}, "$.requires"),
        (["gpu"], "$.requires"),
    ):
        for read, value in ((read_task, LEAST), (read_capture, {})):
            with pytest.raises(Refused) as refused:
                read({**value, "requires": bad})
            assert refused.value.path == path, bad
