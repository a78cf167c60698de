"""Harbor directories and Terminal-Bench's older form: what becomes of each field, and what is refused or
noted instead of being dropped.
"""

import os
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st
from sources_kit import DATA, items, refusal, task

from polarnode.core import codec
from polarnode.core.errors import Refused
from polarnode.evaluators import harbor as evaluator
from polarnode.sources import UnreadTask
from polarnode.sources.harbor import UNUSED, HarborTask, strip_canary
from polarnode.sources.reading import ContainerStart, below, inline, lines, make_build, read_dockerfile
from polarnode.sources.terminal_bench import OldTask

HELLO = DATA / "harbor" / "hello"
SHELL = {"harness": {"name": "shell", "command": ["true"]}}


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(HELLO, tmp_path / "hello"))


def with_toml(folder: Path, text: str) -> Path:
    (folder / "task.toml").write_text(text)
    return folder


# ── a whole task ──────────────────────────────────────────────────────────────


def test_directory_becomes_a_task() -> None:
    found = task(HELLO, harness="pi")
    spec, runtime = found.spec, found.spec.runtime
    assert spec.instruction == (HELLO / "instruction.md").read_text()
    assert (runtime.workdir, runtime.user, runtime.read_only) == ("/app", "root", False)
    assert (runtime.cpus, runtime.memory_mb, runtime.disk_mb) == (1, 512, 2048)
    assert (spec.budgets.run_s, spec.budgets.post_s) == (120, 150), (
        "the tests' own seconds, and what surrounds them"
    )
    assert spec.metadata == {
        "author_name": "Somebody",
        "difficulty": "easy",
        "written": "2025-11-07",
        "tags": ["files"],
        "source": "harbor",
        "name": "hello",
    }
    assert found.notes == ()
    assert (found.name, found.origin) == ("hello", str(HELLO))


def test_image_built_with_harness_on_top(hello: Path) -> None:
    found = task(hello, harness="pi")
    assert found.build is not None
    assert (found.build.folder, found.build.containerfile, found.build.limit_s) == (
        hello / "environment",
        "Dockerfile",
        300,
    )
    assert found.spec.runtime.image == found.build.image
    assert found.spec.runtime.add_harness
    assert not task(hello, over=SHELL).spec.runtime.add_harness, "a command of the task's own needs nothing"
    assert not task(hello, harness="pi", over={"runtime": {"add_harness": False}}).spec.runtime.add_harness
    own = task(hello, harness="pi", over={"runtime": {"image": "mine:1"}})
    assert (own.build, own.spec.runtime.image) == (None, "mine:1")


def test_tests_go_to_the_evaluator() -> None:
    config = task(HELLO, harness="pi").spec.evaluator.config
    read = evaluator.read_config(config)
    assert set(read.tests) == {"test.sh", "expected.txt", "raw.bin"}
    raw, test = read.tests["raw.bin"], read.tests["test.sh"]
    assert not isinstance(raw, str)
    assert b64decode(raw.base64 or "") == b"\x89\x00\xff"
    assert not isinstance(test, str)
    assert test.mode == 0o755
    assert read.verifier_timeout == 90


def test_agent_sees_no_tests_or_solution() -> None:
    spec = task(HELLO, harness="pi").spec
    shown = codec.dump_json(
        [spec.instruction, *(codec.plain(part) for part in (spec.runtime, spec.harness, spec.metadata))]
    )
    assert b"expected" not in shown
    assert b"the-gold-solution" not in codec.dump_json(codec.task_json(spec)), "the solution goes nowhere"


def test_every_supported_field_is_read() -> None:
    spec = task(DATA / "harbor" / "many", harness="codex").spec
    runtime = spec.runtime
    assert (runtime.image, runtime.workdir, runtime.user) == ("quay.example/many:2", "/srv", "worker")
    assert (runtime.cpus, runtime.memory_mb, runtime.disk_mb) == (1.5, 4096, 10240)
    assert runtime.egress == ("pypi.example", "*.files.example")
    assert runtime.artifacts == ("/srv/report.txt", "/srv/logs")
    assert dict(runtime.env) == {"GREETING": "hi"}
    assert spec.harness.mcp_servers["search"].url == "http://127.0.0.1:9000/mcp"
    assert spec.evaluator.config["env"] == {"MODE": "strict", "LEVEL": "3"}
    assert spec.evaluator.config["user"] == "root"


def test_meaningless_fields_are_noted() -> None:
    assert task(DATA / "harbor" / "many", harness="codex").notes == (
        "environment.allowed_hosts: 192.0.2.1 is an address, and only names of hosts can be reached",
        "environment.allowed_hosts: 198.51.100.0/24 is an address, and only names of hosts can be reached",
        f"environment.skills_dir is not used: {UNUSED['environment.skills_dir']}",
        f"environment.healthcheck is not used: {UNUSED['environment.healthcheck']}",
    )


def test_bad_task_hides_no_others(hello: Path) -> None:
    """A folder of tasks is all of them, and a bad one hides none."""
    bad = hello.parent / "bad"
    shutil.copytree(hello, bad)
    (bad / "instruction.md").unlink()
    found = items(hello.parent, harness="pi")
    assert [each.name for each in found] == ["bad", "hello"]
    assert isinstance(found[0], UnreadTask)
    assert str(found[0].refused) == f"{bad / 'instruction.md'} cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ('[[steps]]\nname = "one"', "it has several steps"),
        ('[environment]\nos = "windows"', "its container is windows"),
        ("[environment]\ngpus = 1", "it asks for GPUs in the container"),
        ('[verifier]\nenvironment_mode = "separate"', "its tests run in a container of their own"),
        ('[environment]\nmemory = "lots"', "environment.memory is 'lots': write a size such as 2G"),
        (
            '[environment.env]\nTOKEN = "${SECRET}"',
            "environment.env.TOKEN takes SECRET from the machine's environment",
        ),
        (
            '[[environment.mcp_servers]]\nname = "s"\nurl = "http://127.0.0.1:1"',
            "the MCP server s speaks over sse",
        ),
        ("[environment]\ncpus = true", "task.toml: environment.cpus must be a number or null, not a boolean"),
        (
            "[agent]\ntimeout_sec = -1",
            "budgets.run_s must be more than 0 seconds and at most 2592000 (30 days), not -1",
        ),
        ("[[", "task.toml: it is not TOML"),
    ],
)
def test_unsupported_environment_is_refused(hello: Path, toml: str, sentence: str) -> None:
    assert sentence in refusal(with_toml(hello, toml), "harbor", harness="pi")


def test_missing_parts_are_refused(hello: Path) -> None:
    (hello / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    assert "environment/docker-compose.yaml asks for several containers" in refusal(hello, harness="pi")
    shutil.rmtree(hello / "environment")
    assert "it has neither environment.docker_image nor environment/Dockerfile" in refusal(
        hello, harness="pi"
    )
    (hello / "tests" / "test.sh").unlink()
    assert "it has no tests/test.sh" in refusal(hello, harness="pi")


def test_unknown_workdir_is_noted(hello: Path) -> None:
    (hello / "environment" / "Dockerfile").write_text("FROM quay.example/x\nUSER $WHO\n")
    found = task(hello, harness="pi")
    assert found.spec.runtime.workdir == "/app"
    assert "its workdir is the image's own, which is not known here: /app is used" in found.notes[0]
    unlimited = task(with_toml(hello, "[verifier]\ntimeout_sec = 5.0\n"), harness="pi")
    assert any(note.startswith("it may reach the whole internet") for note in unlimited.notes)


KNOWN = {
    part: {field.alias for field in fields(type(getattr(HarborTask(), part)))}
    for part in ("environment", "agent", "verifier")
}


@given(st.sampled_from(sorted(KNOWN)), st.from_regex(r"[a-z]{3,12}", fullmatch=True))
def test_no_field_is_dropped_in_silence(part: str, name: str) -> None:
    from polarnode.sources.harbor import _unused  # the one law of this reader

    said = list(_unused({part: {name: 1}, "verifier": {"timeout_sec": 1}}))
    assert said == ([] if name in KNOWN[part] else [f"{part}.{name}"]) or part == "verifier"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<!-- harbor-canary GUID 1 -->\n# BENCHMARK CANARY\n\n\nDo it.\n", "Do it.\n"),
        ("Do it.\n<!-- canary -->\n", "Do it.\n<!-- canary -->\n"),
        ("\n# Task\nDo it.", "\n# Task\nDo it."),
        ("# canary", ""),
    ],
)
def test_leading_marks_are_not_shown(text: str, shown: str) -> None:
    assert strip_canary(text) == shown


# ── folders and Dockerfiles ───────────────────────────────────────────────────


def test_image_name_depends_on_contents(hello: Path) -> None:
    """The image built from a folder is named after all that the folder holds."""

    def image() -> str:
        return make_build(hello / "environment", "Dockerfile", limit_s=1).image

    seen = {image()}
    (hello / "environment" / "more").write_text("x")
    seen.add(image())
    (hello / "environment" / "more").chmod(0o755)
    seen.add(image())
    (hello / "environment" / "more").rename(hello / "environment" / "less")
    seen.add(image())
    (hello / "environment" / "link").symlink_to("less")
    seen.add(image())
    assert len(seen) == 5
    moved = shutil.copytree(hello / "environment", hello / "elsewhere", symlinks=True)
    assert make_build(Path(moved), "Dockerfile", limit_s=9).image == image(), (
        "where it lies and how long it takes are not in its name"
    )


def test_no_link_leaves_the_folder(hello: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (hello / "tests" / "stolen").symlink_to(tmp_path / "secret")
    with pytest.raises(Refused, match="stolen is a link that leads out of"):
        inline(hello / "tests")
    assert "leads out of" in refusal(hello, harness="pi")
    (hello / "tests" / "stolen").unlink()
    (hello / "tests" / "again").symlink_to("test.sh")
    assert inline(hello / "tests")["again"] == inline(hello / "tests")["test.sh"]
    (hello / "tests" / "round").symlink_to(".")
    with pytest.raises(Refused, match="is a link to a folder"):
        list(below(hello / "tests"))


def test_oversized_folder_is_refused(hello: Path) -> None:
    with (hello / "tests" / "huge").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(Refused, match="too large to travel with the task"):
        inline(hello / "tests")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="gone cannot be read: No such file"):
        list(lines(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("FROM a\nWORKDIR /x\nWORKDIR y\nUSER me:them\n", ContainerStart(workdir="/x/y", user="me")),
        ("FROM a AS build\nWORKDIR /build\nUSER b\nFROM a\nCOPY --from=build /x /x\n", ContainerStart()),
        ("FROM a AS one\nWORKDIR /one\nFROM one\nUSER u\n", ContainerStart(workdir="/one", user="u")),
        ("from a\nworkdir /app\n# WORKDIR /no\n", ContainerStart(workdir="/app")),
        ("FROM a\nWORKDIR $HOME/x\nUSER ${WHO}\n", ContainerStart()),
        ("FROM a\nRUN echo \\\n  WORKDIR /no \\\n  && true\nWORKDIR /yes\n", ContainerStart(workdir="/yes")),
        ("FROM a\nRUN <<EOF\nWORKDIR /no\nEOF\nWORKDIR /yes\n", ContainerStart(workdir="/yes")),
        ('FROM --platform=linux/amd64 a\r\nWORKDIR "/a b"\r\n', ContainerStart(workdir="/a b")),
        ("FROM a\nWORKDIR relative\n", ContainerStart()),
        ("", ContainerStart()),
    ],
)
def test_dockerfile_gives_workdir_and_user(text: str, start: ContainerStart) -> None:
    assert read_dockerfile(text) == start


@given(st.text(max_size=80))
def test_no_dockerfile_is_too_strange(text: str) -> None:
    start = read_dockerfile("FROM a\n" + text)
    assert start.workdir is None or start.workdir.startswith("/")


# ── Terminal-Bench's older form ───────────────────────────────────────────────


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "terminal_bench" / "simple", tmp_path / "simple"))


def test_simple_older_task_is_read(simple: Path) -> None:
    found = task(simple, harness="pi")
    spec = found.spec
    assert spec.instruction == "Write `ok` to /app/out.txt."
    assert (spec.runtime.workdir, spec.runtime.user, spec.runtime.add_harness) == ("/app", "root", True)
    assert (spec.budgets.run_s, spec.budgets.post_s) == (360, 120)
    assert found.build is not None
    assert found.build.folder == simple, "its Dockerfile is built in the task's own folder"
    read = evaluator.read_config(spec.evaluator.config)
    assert set(read.tests) == {"run-tests.sh", "check_outputs.py"}
    assert spec.metadata["name"] == "simple"
    assert spec.metadata["difficulty"] == "easy"
    assert len(found.notes) == 1


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("task.yaml", "parser_name: pytest", "parser_name: swebench", "read by the parser swebench"),
        (
            "task.yaml",
            "run_tests_in_same_shell: false",
            "run_tests_in_same_shell: true",
            "run in the agent's own shell",
        ),
        ("task.yaml", "instruction: |-", "descriptions: |-", "descriptions must be a list"),
        (
            "docker-compose.yaml",
            "services:\n",
            "services:\n  db: {image: x}\n",
            "docker-compose.yaml asks for several containers",
        ),
        (
            "docker-compose.yaml",
            "    container_name",
            "    privileged: true\n    container_name",
            "docker-compose.yaml asks for privileged",
        ),
        (
            "docker-compose.yaml",
            "dockerfile: Dockerfile",
            "dockerfile: Other",
            "builds another file than Dockerfile",
        ),
    ],
)
def test_complex_older_task_is_refused(simple: Path, name: str, old: str, new: str, sentence: str) -> None:
    """An older task that is not simple is refused with the remedy."""
    file = simple / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    assert sentence in refusal(simple, harness="pi")


def test_incomplete_older_task_is_refused(simple: Path) -> None:
    (simple / "run-tests.sh").unlink()
    assert "it has no run-tests.sh: Harbor's own" in refusal(simple, harness="pi")
    (simple / "task.yaml").write_text("difficulty: easy\n")
    assert "has no instruction, or several" in refusal(simple, harness="pi")
    assert OldTask().parser_name == "pytest"


def test_unknown_older_fields_are_noted(simple: Path) -> None:
    said: Any = (simple / "task.yaml").read_text() + "disable_asciinema: true\n"
    (simple / "task.yaml").write_text(said)
    assert "disable_asciinema is not used: it has no meaning here" in task(simple, harness="pi").notes


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("instruction.md", "secret.txt"),
        ("task.toml", "secret.txt"),
        ("tests", "."),
        ("environment/Dockerfile", "secret.txt"),
        ("environment", "."),
    ],
)
def test_nothing_outside_folder_is_read(tmp_path: Path, name: str, link: str) -> None:
    """A folder of tasks may come from elsewhere. An instruction is shown to the agent, tests to its container."""
    shutil.copytree(DATA / "harbor" / "hello", tmp_path / "hello")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text('[metadata]\nsecret = "key"\n')
    (outside / "test.sh").write_text("true")
    (outside / "Dockerfile").write_text("FROM a\n")
    part = tmp_path / "hello" / name
    part.rename(tmp_path / "moved")
    part.symlink_to(outside / link)
    assert "is a link that leads out of" in refusal(tmp_path / "hello", "harbor", harness="pi")


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    shutil.copytree(DATA / "harbor" / "hello", tmp_path / "hello")
    (tmp_path / "hello" / "instruction.md").unlink()
    os.mkfifo(tmp_path / "hello" / "instruction.md")
    assert "is neither a file nor a folder" in refusal(tmp_path / "hello", "harbor", harness="pi")


def test_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    shutil.copytree(DATA / "harbor" / "hello", tmp_path / "hello")
    for name in ("instruction.md", "tests/expected.txt"):
        file = tmp_path / "hello" / name
        content = file.read_bytes()
        os.truncate(file, 1 << 40)  # sparse: it takes no disk, and would take all memory
        assert "too large to travel" in refusal(tmp_path / "hello", "harbor", harness="pi")
        file.write_bytes(content)


def test_undecodable_file_name_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "harbor" / "hello", tmp_path / "hello")
    odd = os.fsdecode(b"\xff.txt")
    (tmp_path / "hello" / "environment" / odd).write_text("x")
    assert task(tmp_path / "hello", "harbor", harness="pi").build is not None  # its image may have any name
    (tmp_path / "hello" / "tests" / odd).write_text("x")
    assert "give it a name in UTF-8" in refusal(tmp_path / "hello", "harbor", harness="pi")
