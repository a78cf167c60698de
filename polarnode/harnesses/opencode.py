"""opencode: speaks the API of the AI-SDK adapter its config names; it ships with four. Configured by
`~/.config/opencode/opencode.json`.

Measured with 1.18.34. `--title` saves a side call before the first turn. After a compaction it exits with 1
although its work is done, so its exit code alone does not decide. A missing finish reason, a JSON body or a
prompt that stays too long sends it into an endless loop.
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
    model_name,
    skill_files,
)

VERSION = "1.18.34"
ADAPTERS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
APIS = tuple(ADAPTERS)
MAX_REPLY_TOKENS = 8192  # per reply; it also keeps this many free before it compacts

OWN = {
    "LOCAL_API_KEY": "",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_SHARE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}


def launch(order: HarnessOrder) -> Launch:
    """`opencode run` with all permissions granted in its config: the container is the sandbox. The
    instruction comes by stdin: as an argument it is shown to the model in quotes, and a numeric one crashes
    it.
    """
    check_setting_names(order.settings, ("api",))
    name = model_name(order)
    return Launch(
        argv=("opencode", "run", "-m", f"local/{name}", "--title", "task"),
        env=environment(order, {**OWN, "LOCAL_API_KEY": order.endpoint.key}),
        files={
            f"{order.home}/.config/opencode/opencode.json": json_bytes(_config(order, name)),
            **skill_files(order, ".config/opencode/skills"),
        },
        stdin=order.instruction.encode(),
    )


def _config(order: HarnessOrder, name: str) -> dict[str, Json]:
    return {
        "autoupdate": False,
        "share": "disabled",
        "permission": {"*": "allow"},
        "model": f"local/{name}",
        "small_model": f"local/{name}",
        "provider": {"local": _provider_config(order, name)},
        "mcp": {server: _server(spec) for server, spec in order.mcp_servers.items()},
    }


def _provider_config(order: HarnessOrder, name: str) -> dict[str, Json]:
    adapter, path = ADAPTERS[choice(order.settings, "api", APIS)]
    window = order.endpoint.context_length
    limit: dict[str, Json] = {"context": window, "output": min(MAX_REPLY_TOKENS, window // 4)}
    return {
        "npm": adapter,
        "name": "local",
        "options": {"baseURL": f"{order.endpoint.base_url}{path}", "apiKey": "{env:LOCAL_API_KEY}"},
        "models": {name: {"name": name, "limit": limit, "tool_call": True}},
    }


def _server(server: McpServerSpec) -> dict[str, Json]:
    if server.command is not None:
        return {
            "type": "local",
            "command": [server.command, *server.args],
            "environment": dict(server.env),
            "enabled": True,
        }
    return {"type": "remote", "url": server.url, "headers": dict(server.headers), "enabled": True}


HARNESS = Harness(
    name="opencode",
    version=VERSION,
    image="opencode",
    launch=launch,
    apis=APIS,
    exit_code_honest=False,
    mcp_servers=True,
    skills=True,
)
