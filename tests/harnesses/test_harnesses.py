"""How each harness is launched: pointed at its endpoint and nowhere else, nothing through a shell, nothing of
ours in its environment.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode import harnesses
from polarnode.core.errors import Refused
from polarnode.core.ports import Endpoint, HarnessOrder
from polarnode.core.task import HarnessSpec, McpServerSpec
from polarnode.harnesses import codex, harness, pi, shell

BASE = "http://127.0.0.1:8080"
KEY = "sk-polarnode-test"


def order(**changed: Any) -> HarnessOrder:
    given_: dict[str, Any] = {
        "instruction": "Write kiwi into out.txt",
        "endpoint": Endpoint(base_url=BASE, key=KEY, context_length=65536, model="tiny"),
        "workdir": "/work",
        "home": "/home/agent",
        "model_name": None,
        "settings": {},
        "env": {},
        "command": ("agent",),
    }
    return HarnessOrder(**{**given_, **changed})


@pytest.mark.parametrize("name", sorted(harnesses.HARNESSES))
def test_harness_gets_only_its_endpoint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every harness is told its endpoint and key, and no other."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-the-nodes-own")
    launch = harnesses.HARNESSES[name].launch(order())
    told = json.dumps(
        [launch.argv, dict(launch.env), {path: text.decode() for path, text in launch.files.items()}]
    )
    assert "Write kiwi" in told + launch.stdin.decode()
    assert BASE in told
    assert KEY in told
    assert "sk-the-nodes-own" not in told
    assert launch.env["HOME"] == "/home/agent"
    assert launch.env["DO_NOT_TRACK"] == "1"
    assert all(path.startswith("/home/agent/") for path in launch.files)


@pytest.mark.parametrize("name", sorted(harnesses.HARNESSES))
def test_task_environment_wins(name: str) -> None:
    assert (
        harnesses.HARNESSES[name].launch(order(env={"TERM": "xterm", "MORE": "1"})).env.items()
        >= {"TERM": "xterm", "MORE": "1"}.items()
    )


@pytest.mark.parametrize("name", sorted(harnesses.HARNESSES))
def test_unknown_setting_refused_with_path(name: str) -> None:
    with pytest.raises(Refused) as refused:
        harnesses.HARNESSES[name].launch(order(settings={"apu": 1}))
    assert refused.value.path == "$.harness.settings.apu"


@pytest.mark.parametrize("name", sorted(known.name for known in harnesses.HARNESSES.values() if known.apis))
def test_unsupported_api_lists_supported_ones(name: str) -> None:
    with pytest.raises(Refused, match=f"one of {harnesses.HARNESSES[name].apis[0]}") as refused:
        harnesses.HARNESSES[name].launch(order(settings={"api": "telepathy"}))
    assert refused.value.path == "$.harness.settings.api"


def test_overlong_instruction_names_the_remedy() -> None:
    """An instruction that no argument can hold is refused with the remedy."""
    with pytest.raises(Refused, match="put it in a file of the workspace") as refused:
        codex.launch(order(instruction="ä" * 65536))
    assert refused.value.path == "$.instruction"
    assert codex.launch(order(instruction="ä" * 65535)).argv[-1] == "ä" * 65535


def test_shell_fills_only_known_fields() -> None:
    launch = shell.launch(
        order(command=("run", "{instruction}", "{base_url}/v1", "{unknown}", "{", "}{model}"))
    )
    assert launch.argv == ("run", "Write kiwi into out.txt", f"{BASE}/v1", "{unknown}", "{", "}local-model")


@given(st.text())
def test_shell_fills_literally_and_once(instruction: str) -> None:
    launch = shell.launch(order(instruction=instruction, command=("{instruction}",)))
    assert launch.argv == (instruction,)


def test_shell_without_command_is_refused() -> None:
    with pytest.raises(Refused, match="needs a command"):
        shell.launch(order(command=None))


def test_unknown_harness_or_version_refused() -> None:
    with pytest.raises(Refused, match=r"there are: claude_code, codex, gemini_cli, .*shell"):
        harnesses.find(HarnessSpec(name="codexx"))
    with pytest.raises(Refused, match=r"pins 1\.6\.0"):
        harnesses.find(HarnessSpec(name="pi", version="0.1"))
    assert harnesses.find(HarnessSpec(name="pi", version=pi.VERSION)) is pi.HARNESS


OWN = harness.Harness(name="own", version="1", image="base", launch=shell.launch)


def test_imported_harness_must_be_allowed() -> None:
    """A user's own harness comes by import path, where the node allows it."""
    spec = HarnessSpec(import_path=f"{__name__}:OWN")
    assert harnesses.find(spec, allowed_imports=("*",)).name == "own"
    with pytest.raises(Refused):
        harnesses.find(spec)
    with pytest.raises(Refused, match="not a polarnode"):
        harnesses.find(HarnessSpec(import_path=f"{__name__}:BASE"), allowed_imports=("*",))


@pytest.mark.parametrize(
    ("name", "more", "path", "able"),
    [
        (
            "pi",
            {"mcp_servers": {"w": McpServerSpec(command="x")}},
            "$.harness.mcp_servers",
            "claude_code, codex",
        ),
        ("mini_swe_agent", {"skills": {"k": "text"}}, "$.harness.skills", "codex, gemini_cli"),
        ("shell", {"skills": {"k": "text"}}, "$.harness.skills", "leave them out"),
        (
            None,
            {"mcp_servers": {"w": McpServerSpec(command="x")}},
            "$.harness.mcp_servers",
            "own takes no mcp_servers",
        ),
    ],
)
def test_unsupported_harness_field_is_refused(
    name: str | None, more: dict[str, Any], path: str, able: str
) -> None:
    spec = (
        HarnessSpec(import_path=f"{__name__}:OWN", **more) if name is None else HarnessSpec(name=name, **more)
    )
    with pytest.raises(Refused, match=able) as refused:
        harnesses.find(spec, allowed_imports=("*",))
    assert refused.value.path == path
    assert harnesses.find(HarnessSpec(name="codex", **more)) is codex.HARNESS


def test_shell_sets_every_sdks_endpoint() -> None:
    env = shell.launch(order(instruction="x")).env
    assert (env["OPENAI_BASE_URL"], env["ANTHROPIC_BASE_URL"], env["GOOGLE_GEMINI_BASE_URL"]) == (
        f"{BASE}/v1",
        BASE,
        BASE,
    )
    assert {env[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")} == {KEY}
    assert {env[name] for name in ("OPENAI_MODEL", "ANTHROPIC_MODEL", "GEMINI_MODEL")} == {"local-model"}
    assert env["POLARNODE_INSTRUCTION"] == "x"


def test_harnesses_that_ignore_cut_calls() -> None:
    """OpenClaw's loop runs calls at `toolUse` alone (its code). Codex runs those of an incomplete response,
    and then ends with exit code 1 without another request (measured with its pinned version).
    """
    found = {name for name, each in harnesses.HARNESSES.items() if each.calls_first}
    assert found == {"openclaw", "codex"}
