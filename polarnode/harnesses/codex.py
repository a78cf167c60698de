"""Codex CLI: speaks OpenAI Responses and is configured by `~/.codex/config.toml`; the environment alone
cannot redirect it.

Measured with 0.171.0. The config defines a provider `local`, because the built-in one opens a WebSocket
first, compacts remotely and adds fields. A context overflow is fatal to Codex, so the true window is set and
it compacts before that. The model's name decides the tools: an unknown name gives plain functions, `gpt-5.5`
a freeform `apply_patch`, `gpt-5.6` and above one JavaScript tool. An empty answer ends it with exit code 0. A
`response.incomplete` ends it with exit code 1 and without a further request (measured against a stub that
says `max_output_tokens`, with text, with calls, with both and with neither). It runs the calls of that answer
first, but their results never reach the model. So it is told that an answer with calls ended with its calls.
"""

from polarnode.core.conversation import Json
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.task import McpServerSpec
from polarnode.harnesses.harness import (
    Harness,
    argument,
    check_setting_names,
    choice,
    environment,
    model_name,
    skill_files,
    toml_bytes,
)

VERSION = "0.171.0"
APIS = ("responses",)
# Codex compacts at this share of the window, so that the summary call, its answer and one more tool result
# still fit.
COMPACT_SHARE = 0.8


def launch(order: HarnessOrder) -> Launch:
    """`codex exec -- INSTRUCTION` with all permissions granted: the container is the sandbox."""
    return _build_launch(order, ("exec",))


def resume(order: HarnessOrder) -> Launch:
    """`codex exec resume --last -- INSTRUCTION`: the newest conversation of the workdir."""
    return _build_launch(order, ("exec", "resume", "--last"))


def _build_launch(order: HarnessOrder, command: tuple[str, ...]) -> Launch:
    check_setting_names(order.settings, ("api",))
    choice(order.settings, "api", APIS)
    argv = (
        "codex",
        *command,
        "--dangerously-bypass-approvals-and-sandbox",
        "--skip-git-repo-check",
        "--json",
        "--",
    )
    return Launch(
        argv=(*argv, argument(order.instruction, special=())),
        env=environment(order, {"CODEX_HOME": f"{order.home}/.codex", "LOCAL_API_KEY": order.endpoint.key}),
        files={
            f"{order.home}/.codex/config.toml": toml_bytes(_config(order)),
            **skill_files(order, ".codex/skills"),
        },
    )


def _config(order: HarnessOrder) -> dict[str, Json]:
    window = order.endpoint.context_length
    provider: dict[str, Json] = {
        "name": "local",
        "base_url": f"{order.endpoint.base_url}/v1",
        "env_key": "LOCAL_API_KEY",
        "wire_api": "responses",
    }
    return {
        "model": model_name(order),
        "model_provider": "local",
        "model_context_window": window,
        "model_auto_compact_token_limit": int(window * COMPACT_SHARE),
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "check_for_update_on_startup": False,
        "web_search": "disabled",  # a hosted tool, which the model cannot call
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "model_providers": {"local": provider},
        "mcp_servers": {name: _server(server) for name, server in order.mcp_servers.items()},
    }


def _server(server: McpServerSpec) -> dict[str, Json]:
    if server.command is not None:
        return {"command": server.command, "args": list(server.args), "env": dict(server.env)}
    return {"url": server.url, "http_headers": dict(server.headers)}


HARNESS = Harness(
    name="codex",
    version=VERSION,
    image="codex",
    launch=launch,
    apis=APIS,
    mcp_servers=True,
    skills=True,
    resume=resume,
    calls_first=True,
)
