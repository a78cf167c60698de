"""OpenClaw: speaks Chat, Responses or Anthropic and is configured by one config file; no gateway runs.

Measured with 2026.9.6. It appends a volatile user message to each request and removes it from the next. It
strips the `_` from call ids. It exits with 0 even when it ignored tool calls: it runs those of an answer only
if the answer ended with them (`stopReason` is `toolUse`), in every API. Its own deadline of ten minutes
is raised, so that the run budget ends it.
"""

from polarnode.core.conversation import Json
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.task import McpServerSpec
from polarnode.harnesses.harness import (
    Harness,
    check_setting_names,
    choice,
    environment,
    json_bytes,
    mcp_server_json,
    model_name,
    skill_files,
)

VERSION = "2026.9.6"
BASE_PATHS = {"openai-completions": "/v1", "openai-responses": "/v1", "anthropic-messages": "/v1"}
APIS = tuple(BASE_PATHS)
MAX_REPLY_TOKENS = 8192  # per reply, if the context allows it
DEADLINE_S = 604800  # a week: longer than any run budget

QUIET = {"OPENCLAW_NO_AUTO_UPDATE": "1", "OPENCLAW_DISABLE_BONJOUR": "1"}


def launch(order: HarnessOrder) -> Launch:
    """`openclaw agent exec --message-file FILE` with all approvals off: the container is the sandbox."""
    check_setting_names(order.settings, ("api",))
    folder, name = f"{order.home}/.openclaw", model_name(order)
    config, message = f"{folder}/openclaw.json", f"{folder}/instruction.md"
    argv = (
        "openclaw",
        "agent",
        "exec",
        "--message-file",
        message,
        "--cwd",
        order.workdir,
        "--config",
        config,
    )
    return Launch(
        argv=(*argv, "--model", f"local/{name}", "--timeout", str(DEADLINE_S), "--json"),
        env=environment(order, QUIET),
        files={
            config: json_bytes(_config(order, name, f"{folder}/skills")),
            message: order.instruction.encode(),
            **skill_files(order, ".openclaw/skills"),
        },
    )


def _config(order: HarnessOrder, name: str, skills: str) -> dict[str, Json]:
    return {
        "update": {"checkOnStart": False, "auto": {"enabled": False}},
        "agents": {
            "defaults": {
                "model": {"primary": f"local/{name}"},
                "workspace": order.workdir,
                "skipBootstrap": True,
            }
        },
        "tools": {"exec": {"security": "full", "ask": "off"}},
        "models": {"mode": "merge", "providers": {"local": _provider_config(order, name)}},
        "mcp": {"servers": {server: _server(spec) for server, spec in order.mcp_servers.items()}},
        "skills": {"load": {"extraDirs": [skills] if order.skills else []}},
    }


def _provider_config(order: HarnessOrder, name: str) -> dict[str, Json]:
    api = choice(order.settings, "api", APIS)
    window = order.endpoint.context_length
    model: dict[str, Json] = {
        "id": name,
        "name": name,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": window,
        "maxTokens": min(MAX_REPLY_TOKENS, window // 4),
    }
    return {
        "baseUrl": f"{order.endpoint.base_url}{BASE_PATHS[api]}",
        "apiKey": order.endpoint.key,
        "api": api,
        "models": [model],
    }


def _server(server: McpServerSpec) -> dict[str, Json]:
    return (
        mcp_server_json(server)
        if server.command is not None
        else {**mcp_server_json(server), "transport": "streamable-http"}
    )


HARNESS = Harness(
    name="openclaw",
    version=VERSION,
    image="openclaw",
    launch=launch,
    apis=APIS,
    exit_code_honest=False,
    calls_first=True,
    mcp_servers=True,
    skills=True,
)
