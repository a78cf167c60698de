"""Gemini CLI: speaks Google generateContent; its environment sets the endpoint, `~/.gemini/settings.json` the
rest.

Measured with 0.61.0. Without `-m` it calls a router model first, so the model is always named. It assumes a
window of about a million tokens for every unknown model, and a context overflow is fatal to it. Its
compression threshold is a share of that assumed window and is set to a share of the true one. An error in
mid-stream ends it with exit code 0.
"""

from polarnode.core.conversation import Json
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.harnesses.harness import (
    Harness,
    argument,
    check_setting_names,
    choice,
    environment,
    json_bytes,
    mcp_server_json,
    model_name,
    skill_files,
)

VERSION = "0.61.0"
APIS = ("gemini", "vertex")
ASSUMED_WINDOW = 1_048_576  # tokens; it assumes this window for any unknown model
# It compresses at this share of the window. It estimates tokens from characters before it sends, and the
# answer must fit too.
COMPACT_SHARE = 0.7


def launch(order: HarnessOrder) -> Launch:
    """`gemini --prompt=INSTRUCTION` with all permissions granted: the container is the sandbox. Joined by
    `=`, the instruction is never parsed as an option.
    """
    check_setting_names(order.settings, ("api",))
    api = choice(order.settings, "api", APIS)
    argv = (
        "gemini",
        "--yolo",
        "--skip-trust",
        "-m",
        model_name(order),
        f"--prompt={argument(order.instruction, special=('/',))}",
    )
    return Launch(
        argv=argv,
        env=environment(order, {**_endpoint(order, api), "GEMINI_TELEMETRY_ENABLED": "false"}),
        files={
            f"{order.home}/.gemini/settings.json": json_bytes(_config(order, api)),
            **skill_files(order, ".gemini/skills"),
        },
    )


def _endpoint(order: HarnessOrder, api: str) -> dict[str, str]:
    base, key = order.endpoint.base_url, order.endpoint.key
    if api == "vertex":
        return {"GOOGLE_GENAI_USE_VERTEXAI": "true", "GOOGLE_VERTEX_BASE_URL": base, "GOOGLE_API_KEY": key}
    return {"GOOGLE_GEMINI_BASE_URL": base, "GEMINI_API_KEY": key}


def _config(order: HarnessOrder, api: str) -> dict[str, Json]:
    return {
        "security": {"auth": {"selectedType": "vertex-ai" if api == "vertex" else "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {
            "compressionThreshold": round(COMPACT_SHARE * order.endpoint.context_length / ASSUMED_WINDOW, 6)
        },
        "mcpServers": {
            name: {**mcp_server_json(server, url="httpUrl"), "trust": True}
            for name, server in order.mcp_servers.items()
        },
    }


HARNESS = Harness(
    name="gemini_cli",
    version=VERSION,
    image="gemini_cli",
    launch=launch,
    apis=APIS,
    exit_code_honest=False,
    mcp_servers=True,
    skills=True,
)
