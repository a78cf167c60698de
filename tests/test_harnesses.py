"""How each harness is launched: pointed at its endpoint and nowhere else, nothing through a shell, nothing of ours in its environment."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarnode.errors import Refused
from polarnode.harnesses import claude_code, harness, mini_swe_agent, pi, registry, shell
from polarnode.ports import Endpoint, HarnessOrder
from polarnode.tasks import HarnessSpec

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


@pytest.mark.parametrize("name", sorted(registry.HARNESSES))
def test_every_harness_is_told_its_endpoint_and_key_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-the-nodes-own")
    launch = registry.HARNESSES[name].launch(order())
    told = json.dumps([launch.argv, dict(launch.env), {path: text.decode() for path, text in launch.files.items()}])
    assert BASE in told
    assert KEY in told
    assert "sk-the-nodes-own" not in told
    assert launch.env["HOME"] == "/home/agent"
    assert launch.env["DO_NOT_TRACK"] == "1"
    assert all(path.startswith("/home/agent/") for path in launch.files)


@pytest.mark.parametrize("name", sorted(registry.HARNESSES))
def test_the_tasks_environment_wins(name: str) -> None:
    assert registry.HARNESSES[name].launch(order(env={"TERM": "xterm", "MORE": "1"})).env.items() >= {"TERM": "xterm", "MORE": "1"}.items()


@pytest.mark.parametrize("name", ["pi", "mini_swe_agent", "claude_code"])
@pytest.mark.parametrize("instruction", ["--help", "@/etc/passwd", "-p x", "plain; rm -rf /", "$(id)"])
def test_an_instruction_is_one_argument_and_never_a_flag(name: str, instruction: str) -> None:
    argv = registry.HARNESSES[name].launch(order(instruction=instruction)).argv
    assert [part for part in argv if instruction in part] == [instruction if instruction[0] not in "-@" else f" {instruction}"]


def test_pi_reads_its_provider_from_its_models_file() -> None:
    launch = pi.launch(order())
    models = json.loads(launch.files["/home/agent/.pi/agent/models.json"])["providers"]["local"]
    assert (models["baseUrl"], models["api"]) == (f"{BASE}/v1", "openai-completions")
    assert launch.env[models["apiKey"]] == KEY
    assert models["models"][0]["contextWindow"] == 65536


def test_pi_speaks_anthropic_when_told() -> None:
    launch = pi.launch(order(settings={"api": "anthropic-messages"}))
    assert json.loads(launch.files["/home/agent/.pi/agent/models.json"])["providers"]["local"]["baseUrl"] == BASE


def test_a_setting_no_harness_knows_is_refused_with_its_path() -> None:
    for name, wrong in (("pi", {"apu": 1}), ("mini_swe_agent", {"step": 1}), ("claude_code", {"x": 1}), ("shell", {"x": 1})):
        with pytest.raises(Refused) as refused:
            registry.HARNESSES[name].launch(order(settings=wrong))
        assert str(refused.value.path).startswith("$.harness.settings.")
    with pytest.raises(Refused, match="one of openai-completions"):
        pi.launch(order(settings={"api": "telepathy"}))


def test_mini_asks_for_no_prices_and_no_confirmation() -> None:
    launch = mini_swe_agent.launch(order(model_name="m"))
    assert launch.argv[:3] == ("mini", "-m", "openai/m")
    assert "-y" in launch.argv
    assert launch.env["OPENAI_API_BASE"] == f"{BASE}/v1"
    assert mini_swe_agent.launch(order(settings={"api": "anthropic"})).env["ANTHROPIC_API_BASE"] == BASE


def test_claude_code_is_told_the_true_window_and_sends_nothing_home() -> None:
    env = claude_code.launch(order()).env
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert env["ANTHROPIC_BASE_URL"] == BASE
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == env["DISABLE_TELEMETRY"] == env["IS_SANDBOX"] == "1"
    assert "--bare" in claude_code.launch(order(settings={"bare": True})).argv


def test_shell_fills_only_what_it_knows() -> None:
    launch = shell.launch(order(command=("run", "{instruction}", "{base_url}/v1", "{unknown}", "{", "}{model}")))
    assert launch.argv == ("run", "Write kiwi into out.txt", f"{BASE}/v1", "{unknown}", "{", "}local-model")


@given(st.text())
def test_shell_fills_literally_and_once(instruction: str) -> None:
    launch = shell.launch(order(instruction=instruction, command=("{instruction}",)))
    assert launch.argv == (instruction,)


def test_shell_without_a_command_is_refused() -> None:
    with pytest.raises(Refused, match="needs a command"):
        shell.launch(order(command=None))


def test_an_unknown_harness_or_version_is_refused() -> None:
    with pytest.raises(Refused, match=r"there are: claude_code, codex, gemini_cli, .*shell"):
        registry.find(HarnessSpec(name="codexx"))
    with pytest.raises(Refused, match=r"pins 0\.73\.1"):
        registry.find(HarnessSpec(name="pi", version="0.1"))
    assert registry.find(HarnessSpec(name="pi", version=pi.VERSION)) is pi.HARNESS


OWN = harness.Harness(name="own", version="1", image="base", launch=shell.launch)


def test_a_users_own_harness_comes_by_import_path_where_the_node_allows_it() -> None:
    spec = HarnessSpec(import_path=f"{__name__}:OWN")
    assert registry.find(spec, allowed_imports=("*",)).name == "own"
    with pytest.raises(Refused):
        registry.find(spec)
    with pytest.raises(Refused, match="not a polarnode"):
        registry.find(HarnessSpec(import_path=f"{__name__}:BASE"), allowed_imports=("*",))
