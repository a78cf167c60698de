"""Each harness's own launch, for every API it speaks: where its endpoint, key, window, servers and skills are
written, and what is switched off.
"""

import json
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_harnesses import BASE, KEY, order

from polarnode import harnesses
from polarnode.core.ports import Launch
from polarnode.core.task import McpServerSpec
from polarnode.harnesses import (
    claude_code,
    gemini_cli,
    hermes,
    mini_swe_agent,
    openclaw,
    opencode,
    openhands_sdk,
    pi,
    qwen_code,
)
from polarnode.harnesses.harness import json_bytes, toml_bytes

HOME = "/home/agent"
CONFIGS = {
    "codex": f"{HOME}/.codex/config.toml",
    "gemini_cli": f"{HOME}/.gemini/settings.json",
    "qwen_code": f"{HOME}/.qwen/settings.json",
    "pi": f"{HOME}/.pi/agent/models.json",
    "opencode": f"{HOME}/.config/opencode/opencode.json",
    "openclaw": f"{HOME}/.openclaw/openclaw.json",
    "hermes": f"{HOME}/.hermes/config.yaml",
    "openhands_sdk": f"{HOME}/.openhands/order.json",
    "claude_code": f"{HOME}/.claude/mcp-servers.json",
}


def launched(name: str, **changed: Any) -> Launch:
    return harnesses.HARNESSES[name].launch(order(**changed))


def config_of(name: str, launch: Launch) -> dict[str, Any]:
    text = launch.files[CONFIGS[name]].decode()
    found: dict[str, Any] = tomllib.loads(text) if name == "codex" else json.loads(text)
    return found


# ── the endpoint, in every API ────────────────────────────────────────────────


def told_endpoint(name: str, launch: Launch) -> tuple[str, str]:
    """The base URL and the key that the harness will read, found as it finds them."""
    config, env = (config_of(name, launch) if name in CONFIGS and name != "claude_code" else {}), launch.env
    if name == "codex":
        provider = config["model_providers"][config["model_provider"]]
        return provider["base_url"], env[provider["env_key"]]
    if name == "pi":
        return config["providers"]["local"]["baseUrl"], env[
            config["providers"]["local"]["apiKey"].removeprefix("$")
        ]
    if name == "opencode":
        options = config["provider"]["local"]["options"]
        return options["baseURL"], env[options["apiKey"].removeprefix("{env:").removesuffix("}")]
    if name == "openclaw":
        return config["models"]["providers"]["local"]["baseUrl"], config["models"]["providers"]["local"][
            "apiKey"
        ]
    if name == "hermes":
        return config["custom_providers"][0]["base_url"], config["custom_providers"][0]["api_key"]
    if name == "openhands_sdk":
        return config["llm"]["base_url"], config["llm"]["api_key"]
    urls = [value for variable, value in env.items() if "BASE" in variable]
    keys = [value for variable, value in env.items() if variable.endswith("_API_KEY")]
    assert len(urls) == len(keys) == 1, "one endpoint, and no way around it"
    return urls[0], keys[0]


PATHS = {
    "claude_code": {"anthropic": ""},
    "codex": {"responses": "/v1"},
    "gemini_cli": {"gemini": "", "vertex": ""},
    "qwen_code": {"openai": "/v1", "openai-responses": "/v1", "anthropic": "", "gemini": ""},
    "pi": {
        "openai-completions": "/v1",
        "openai-responses": "/v1",
        "anthropic-messages": "",
        "google-generative-ai": "/v1beta",
    },
    "opencode": {"chat": "/v1", "responses": "/v1", "anthropic": "/v1", "google": "/v1beta"},
    "openclaw": {"openai-completions": "/v1", "openai-responses": "/v1", "anthropic-messages": "/v1"},
    "hermes": {"chat_completions": "/v1", "codex_responses": "/v1", "anthropic_messages": ""},
    "mini_swe_agent": {"openai": "/v1", "anthropic": "", "responses": "/v1", "text": "/v1"},
    "openhands_sdk": {"openai": "/v1", "responses": "/v1", "anthropic": "", "text": "/v1"},
}


def test_every_api_harness_is_tabled() -> None:
    assert {name: list(paths) for name, paths in PATHS.items()} == {
        known.name: list(known.apis) for known in harnesses.HARNESSES.values() if known.apis
    }


@pytest.mark.parametrize(("name", "api"), [(name, api) for name, paths in PATHS.items() for api in paths])
def test_endpoint_set_for_every_api(name: str, api: str) -> None:
    launch = launched(name, settings={"api": api})
    assert told_endpoint(name, launch) == (f"{BASE}{PATHS[name][api]}", KEY)


@pytest.mark.parametrize("name", PATHS)
def test_first_api_is_default(name: str) -> None:
    assert launched(name) == launched(name, settings={"api": harnesses.HARNESSES[name].apis[0]})


@pytest.mark.parametrize("name", PATHS)
def test_task_model_or_unknown_name(name: str) -> None:
    """A harness is told the model that the task names, else one that nobody knows."""
    for model in (None, "gpt-5.5"):
        launch = launched(name, model_name=model)
        told = json.dumps([launch.argv, dict(launch.env), [text.decode() for text in launch.files.values()]])
        assert (model or "local-model") in told
        assert model is None or "local-model" not in told


def test_dialect_names_of_each_program() -> None:
    assert "litellm_response" in mini_swe_agent.launch(order(settings={"api": "responses"})).argv
    assert {"mini_textbased.yaml", "litellm_textbased"} <= set(
        mini_swe_agent.launch(order(settings={"api": "text"})).argv
    )
    assert "anthropic/local-model" in mini_swe_agent.launch(order(settings={"api": "anthropic"})).argv
    assert gemini_cli.launch(order(settings={"api": "vertex"})).env["GOOGLE_GENAI_USE_VERTEXAI"] == "true"
    for api in qwen_code.APIS:
        argv = qwen_code.launch(order(settings={"api": api})).argv
        assert argv[argv.index("--auth-type") + 1] == api
    for api in hermes.APIS:
        assert (
            config_of("hermes", hermes.launch(order(settings={"api": api})))["custom_providers"][0][
                "api_mode"
            ]
            == api
        )
    for api, (adapter, _) in opencode.ADAPTERS.items():
        assert (
            config_of("opencode", opencode.launch(order(settings={"api": api})))["provider"]["local"]["npm"]
            == adapter
        )
    for api in openclaw.APIS:
        assert (
            config_of("openclaw", openclaw.launch(order(settings={"api": api})))["models"]["providers"][
                "local"
            ]["api"]
            == api
        )
    for api in pi.APIS:
        assert config_of("pi", pi.launch(order(settings={"api": api})))["providers"]["local"]["api"] == api
    llms = {
        api: config_of("openhands_sdk", openhands_sdk.launch(order(settings={"api": api})))["llm"]
        for api in openhands_sdk.APIS
    }
    assert [llms[api]["api_mode"] for api in openhands_sdk.APIS] == ["chat", "responses", "chat", "chat"]
    assert (llms["anthropic"]["model"], llms["text"]["native_tool_calling"]) == (
        "anthropic/local-model",
        False,
    )


# ── the instruction ───────────────────────────────────────────────────────────

CARRIED: dict[str, Callable[[Launch], str]] = {
    "claude_code": lambda launch: launch.argv[-1],
    "codex": lambda launch: launch.argv[-1],
    "gemini_cli": lambda launch: launch.argv[-1].removeprefix("--prompt="),
    "qwen_code": lambda launch: launch.argv[-1].removeprefix("--prompt="),
    "pi": lambda launch: launch.argv[2],
    "opencode": lambda launch: launch.stdin.decode(),
    "openclaw": lambda launch: launch.files[f"{HOME}/.openclaw/instruction.md"].decode(),
    "hermes": lambda launch: launch.argv[-1].removeprefix("--oneshot="),
    "mini_swe_agent": lambda launch: launch.argv[-1].removeprefix("--task="),
    "openhands_sdk": lambda launch: str(config_of("openhands_sdk", launch)["instruction"]),
}
# the others read a first character as an order
LITERAL = {"codex", "opencode", "openclaw", "hermes", "mini_swe_agent", "openhands_sdk"}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    "instruction",
    [
        "--help",
        "@/etc/passwd",
        "/compact",
        "-p x",
        "plain; rm -rf /",
        "$(id)",
        "two\nlines \"quoted\" 'twice'",
        "007",
    ],
)
def test_instruction_arrives_unchanged(name: str, instruction: str) -> None:
    launch = launched(name, instruction=instruction)
    found = CARRIED[name](launch)
    assert found == instruction or (
        name not in LITERAL and instruction[0] in "-@/" and found == f" {instruction}"
    )
    assert launch.argv[0] not in ("sh", "bash")


@pytest.mark.parametrize("name", sorted(set(PATHS) - LITERAL))
@pytest.mark.parametrize(
    "first", {"claude_code": "-/", "gemini_cli": "/", "qwen_code": "/@", "pi": "-@"}.items()
)
def test_option_like_instruction_gets_blank(name: str, first: tuple[str, str]) -> None:
    """An instruction that the program would take for an option gets a blank before it."""
    of, characters = first
    if of == name:
        assert [CARRIED[name](launched(name, instruction=f"{each}x"))[:2] for each in characters] == [
            f" {each}" for each in characters
        ]


@given(st.text(min_size=1, max_size=200).filter(lambda text: "\0" not in text))
def test_any_text_survives_in_every_harness(instruction: str) -> None:
    for name, carried in CARRIED.items():
        assert carried(launched(name, instruction=instruction)).removeprefix(" ") == instruction.removeprefix(
            " "
        )


# ── the window, and silence ───────────────────────────────────────────────────


def test_compacting_harness_knows_true_window() -> None:
    told = {name: config_of(name, launched(name)) for name in CONFIGS if name != "claude_code"}
    assert claude_code.launch(order()).env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert (told["codex"]["model_context_window"], told["codex"]["model_auto_compact_token_limit"]) == (
        65536,
        52428,
    )
    assert told["gemini_cli"]["model"]["compressionThreshold"] * gemini_cli.ASSUMED_WINDOW == pytest.approx(
        0.7 * 65536, rel=1e-3
    )
    assert told["qwen_code"]["model"]["generationConfig"]["contextWindowSize"] == 65536
    assert told["pi"]["providers"]["local"]["models"][0]["contextWindow"] == 65536
    assert told["opencode"]["provider"]["local"]["models"]["local-model"]["limit"] == {
        "context": 65536,
        "output": 8192,
    }
    assert told["openclaw"]["models"]["providers"]["local"]["models"][0]["contextWindow"] == 65536
    assert (told["hermes"]["model"]["context_length"], told["hermes"]["model"]["max_tokens"]) == (
        65536,
        16384,
    )
    assert (told["openhands_sdk"]["llm"]["max_input_tokens"], told["openhands_sdk"]["compact_at"]) == (
        65536,
        45875,
    )


def test_pi_reserves_half_small_window() -> None:
    """Pi keeps half of a small window for the prompt."""
    for window, reserve in ((4096, 1024), (65536, 16384), (1_000_000, 16384)):
        endpoint = evolve(order().endpoint, context_length=window)
        settings = json.loads(pi.launch(order(endpoint=endpoint)).files[f"{HOME}/.pi/agent/settings.json"])[
            "compaction"
        ]
        assert settings["reserveTokens"] == reserve
        assert settings["reserveTokens"] + settings["keepRecentTokens"] <= window // 2


def test_hermes_window_has_a_minimum() -> None:
    """Hermes is told the least window that it starts with."""
    endpoint = evolve(order().endpoint, context_length=32768)
    model = config_of("hermes", hermes.launch(order(endpoint=endpoint)))["model"]
    assert (model["context_length"], model["max_tokens"]) == (64000, 8192)


def test_telemetry_and_updates_are_off() -> None:
    config = {name: config_of(name, launched(name)) for name in CONFIGS if name != "claude_code"}
    env = {name: launched(name).env for name in PATHS}
    assert (
        config["codex"]["check_for_update_on_startup"]
        is config["codex"]["analytics"]["enabled"]
        is config["codex"]["feedback"]["enabled"]
        is False
    )
    for name in ("gemini_cli", "qwen_code"):
        assert (
            config[name]["privacy"]["usageStatisticsEnabled"] is config[name]["telemetry"]["enabled"] is False
        )
        assert config[name]["general"]["enableAutoUpdate"] is False
    assert config["opencode"]["autoupdate"] is config["openclaw"]["update"]["checkOnStart"] is False
    assert config["hermes"]["security"]["allow_lazy_installs"] is False
    on = {
        "claude_code": (
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "DISABLE_TELEMETRY",
            "DISABLE_ERROR_REPORTING",
            "DISABLE_AUTOUPDATER",
            "IS_SANDBOX",
        ),
        "pi": ("PI_OFFLINE", "PI_SKIP_VERSION_CHECK"),
        "opencode": (
            "OPENCODE_DISABLE_AUTOUPDATE",
            "OPENCODE_DISABLE_MODELS_FETCH",
            "OPENCODE_DISABLE_SHARE",
            "OPENCODE_DISABLE_LSP_DOWNLOAD",
        ),
        "openclaw": ("OPENCLAW_NO_AUTO_UPDATE", "OPENCLAW_DISABLE_BONJOUR"),
        "hermes": ("HERMES_DISABLE_LAZY_INSTALLS",),
    }
    assert {(name, variable): env[name].get(variable) for name in on for variable in on[name]} == {
        (name, each): "1" for name in on for each in on[name]
    }
    for name in ("mini_swe_agent", "openhands_sdk"):
        assert env[name]["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    shares = [env["qwen_code"][f"QWEN_MEMORY_PRESSURE_{each}"] for each in ("SOFT", "HARD", "CRITICAL")]
    assert sorted(set(shares)) == shares
    assert min(map(float, shares)) > 0.9, "history is not rewritten for memory that the container has"
    assert max(map(float, shares)) <= 0.98, "more is refused, and the defaults come back"
    assert (env["pi"]["PI_TELEMETRY"], env["qwen_code"]["QWEN_TELEMETRY_ENABLED"]) == ("0", "false")


def test_no_harness_asks_permission() -> None:
    flags = {
        "claude_code": "--dangerously-skip-permissions",
        "codex": "--dangerously-bypass-approvals-and-sandbox",
        "gemini_cli": "--yolo",
        "qwen_code": "-y",
        "hermes": "--yolo",
        "mini_swe_agent": "-y",
    }
    assert all(flag in launched(name).argv for name, flag in flags.items())
    assert config_of("opencode", launched("opencode"))["permission"] == {"*": "allow"}
    assert config_of("openclaw", launched("openclaw"))["tools"]["exec"] == {"security": "full", "ask": "off"}


def test_unstreamed_calls_wait_long() -> None:
    assert f"model.model_kwargs.timeout={mini_swe_agent.CALL_S}" in mini_swe_agent.launch(order()).argv
    assert config_of("openhands_sdk", launched("openhands_sdk"))["llm"]["timeout"] == openhands_sdk.CALL_S


def test_claude_code_bare_setting() -> None:
    assert "--bare" in claude_code.launch(order(settings={"bare": True})).argv
    assert "--bare" not in claude_code.launch(order()).argv


RESUMES = {
    "claude_code": ("--continue",),
    "codex": ("resume", "--last"),
    "pi": ("--continue",),
}


def test_resumable_harnesses_are_tabled() -> None:
    assert {name for name, each in harnesses.HARNESSES.items() if each.resume is not None} == set(RESUMES)


@pytest.mark.parametrize(("name", "words"), RESUMES.items())
def test_resumed_harness_only_adds_words(name: str, words: tuple[str, ...]) -> None:
    """A resumed harness has the same files and environment, and some words more."""
    resume = harnesses.HARNESSES[name].resume
    assert resume is not None
    given = order(skills={"fly": "How to fly."}, instruction="Go on.")
    resumed, launch = resume(given), harnesses.HARNESSES[name].launch(given)
    assert (resumed.files, resumed.env, resumed.stdin) == (launch.files, launch.env, launch.stdin)
    assert sorted(resumed.argv) == sorted((*launch.argv, *words))
    place = resumed.argv.index(words[0])
    assert resumed.argv[place : place + len(words)] == words
    assert resumed.argv[:place] + resumed.argv[place + len(words) :] == launch.argv


def test_openhands_runner_is_valid_python() -> None:
    compile(openhands_sdk.RUNNER, "run.py", "exec")


# ── MCP servers and skills ────────────────────────────────────────────────────

STDIO = McpServerSpec(command="python3", args=("-m", "words server"), env={"WORD": 'ki"wi'})
WEB = McpServerSpec(url="http://127.0.0.1:9/mcp", headers={"X-A": "b"})
PLAIN = {"command": "python3", "args": ["-m", "words server"], "env": {"WORD": 'ki"wi'}}
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "codex": (("mcp_servers",), PLAIN, {"url": WEB.url, "http_headers": {"X-A": "b"}}),
    "claude_code": (
        ("mcpServers",),
        {"type": "stdio", **PLAIN},
        {"type": "http", "url": WEB.url, "headers": {"X-A": "b"}},
    ),
    "gemini_cli": (
        ("mcpServers",),
        {**PLAIN, "trust": True},
        {"httpUrl": WEB.url, "headers": {"X-A": "b"}, "trust": True},
    ),
    "qwen_code": (
        ("mcpServers",),
        {**PLAIN, "trust": True},
        {"httpUrl": WEB.url, "headers": {"X-A": "b"}, "trust": True},
    ),
    "opencode": (
        ("mcp",),
        {
            "type": "local",
            "command": ["python3", "-m", "words server"],
            "environment": {"WORD": 'ki"wi'},
            "enabled": True,
        },
        {"type": "remote", "url": WEB.url, "headers": {"X-A": "b"}, "enabled": True},
    ),
    "openclaw": (
        ("mcp", "servers"),
        PLAIN,
        {"url": WEB.url, "headers": {"X-A": "b"}, "transport": "streamable-http"},
    ),
    "hermes": (("mcp_servers",), PLAIN, {"url": WEB.url, "headers": {"X-A": "b"}}),
    "openhands_sdk": (("mcp",), PLAIN, {"url": WEB.url, "headers": {"X-A": "b"}}),
}
SKILLS = {
    "claude_code": ".claude/skills",
    "codex": ".codex/skills",
    "gemini_cli": ".gemini/skills",
    "qwen_code": ".qwen/skills",
    "pi": ".pi/agent/skills",
    "opencode": ".config/opencode/skills",
    "openclaw": ".openclaw/skills",
    "hermes": ".hermes/skills",
    "openhands_sdk": ".openhands/skills",
}


def test_tables_cover_servers_and_skills() -> None:
    assert set(SERVERS) == {known.name for known in harnesses.HARNESSES.values() if known.mcp_servers}
    assert set(SKILLS) == {known.name for known in harnesses.HARNESSES.values() if known.skills}


@pytest.mark.parametrize("name", SERVERS)
def test_servers_written_where_harness_reads(name: str) -> None:
    keys, stdio, web = SERVERS[name]
    launch = launched(name, mcp_servers={"words": STDIO, "web": WEB})
    found: Any = config_of(name, launch)
    for key in keys:
        found = found[key]
    assert found == {"words": stdio, "web": web}


def test_claude_code_servers_only_when_given() -> None:
    argv = claude_code.launch(order(mcp_servers={"words": STDIO})).argv
    assert argv[argv.index("--mcp-config") + 1 :][:2] == (CONFIGS["claude_code"], "--strict-mcp-config")
    assert "--mcp-config" not in claude_code.launch(order()).argv


@pytest.mark.parametrize("name", SKILLS)
def test_skills_lie_where_harness_looks(name: str) -> None:
    launch = launched(name, skills={"kiwi": "---\nname: kiwi\n---\nBody"})
    assert launch.files[f"{HOME}/{SKILLS[name]}/kiwi/SKILL.md"] == b"---\nname: kiwi\n---\nBody"
    assert not [path for path in launched(name).files if "SKILL" in path]


def test_openclaw_is_told_its_skills() -> None:
    """OpenClaw is given the path of its skills, since its state is elsewhere."""
    config = config_of("openclaw", launched("openclaw", skills={"kiwi": "text"}))
    assert config["skills"]["load"]["extraDirs"] == [f"{HOME}/.openclaw/skills"]


# ── spelling ──────────────────────────────────────────────────────────────────

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN_VALUES = TEXTS | st.booleans() | st.integers(-(2**60), 2**60)
TABLES = st.recursive(
    st.dictionaries(TEXTS, PLAIN_VALUES | st.lists(TEXTS, max_size=3), max_size=3),
    lambda inner: st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)


@given(TABLES)
def test_toml_says_what_it_was_told(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_bytes(table).decode()) == table


def test_null_is_refused_in_toml() -> None:
    assert tomllib.loads(toml_bytes({"a": None, "b": {"c": 1.5}}).decode()) == {"b": {"c": 1.5}}
    assert json.loads(json_bytes({"a": None, "ü": "é"})) == {"a": None, "ü": "é"}
