"""opencode: speaks whatever AI-SDK adapter its config names; four come with it. Told everything by
`~/.config/opencode/opencode.json`.

Measured with 1.18.33. `--title` spares a side call before the first turn. After a compaction it exits 1
although its work is done, so its exit code is not believed. A missing finish reason or a JSON body sends it
into an endless loop, and so does a prompt that stays too long.
"""

from polarnode.core.conversation import Json
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.core.task import McpServerSpec
from polarnode.harnesses.harness import (
    Harness,
    choice,
    environment,
    json_bytes,
    model_name,
    only_settings,
    skill_files,
)

VERSION = "1.18.33"
ADAPTERS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
APIS = tuple(ADAPTERS)
MAX_REPLY_TOKENS = 8192  # what it asks for per reply, and keeps free before it compacts

OWN = {
    "LOCAL_API_KEY": "",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_SHARE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}


def launch(order: HarnessOrder) -> Launch:
    """`opencode run`, every permission given in its config: the container is the sandbox.

    The instruction comes by stdin: as an argument it would be shown to the model in quotes, and one that is a
    number crashes it.
    """
    only_settings(order.settings, ("api",))
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
        "provider": {"local": _provider(order, name)},
        "mcp": {server: _server(spec) for server, spec in order.mcp_servers.items()},
    }


def _provider(order: HarnessOrder, name: str) -> dict[str, Json]:
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
