"""Qwen Code: speaks OpenAI Chat, Responses, Anthropic or Google, by `--auth-type`; told where by its
environment, how by `~/.qwen/settings.json`.

Measured with 0.24.4: 78 kB of a first prompt; a call without headers is given up after 120 s. Its background
helpers (memory, follow-up suggestions) would be calls nobody asked for and are off. Unknown models get 32 000
tokens an answer; the window is told, and it compacts by it.
"""

from polarnode.core.conversation import Json
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.harnesses.harness import (
    Harness,
    argument,
    choice,
    environment,
    json_bytes,
    model_name,
    only_settings,
    server_json,
    skill_files,
)

VERSION = "0.24.4"
APIS = ("openai", "openai-responses", "anthropic", "gemini")


def launch(order: HarnessOrder) -> Launch:
    """`qwen -y --prompt=INSTRUCTION`, every permission given: the container is the sandbox. It drops what
    follows a bare `--`.
    """
    only_settings(order.settings, ("api",))
    api = choice(order.settings, "api", APIS)
    argv = (
        "qwen",
        "-y",
        "--auth-type",
        api,
        "-m",
        model_name(order),
        f"--prompt={argument(order.instruction, special=('/', '@'))}",
    )
    own = {
        **_endpoint(order, api),
        "QWEN_USAGE_STATISTICS_ENABLED": "false",
        "QWEN_TELEMETRY_ENABLED": "false",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }
    return Launch(
        argv=argv,
        env=environment(order, own),
        files={
            f"{order.home}/.qwen/settings.json": json_bytes(_config(order, api)),
            **skill_files(order, ".qwen/skills"),
        },
    )


def _endpoint(order: HarnessOrder, api: str) -> dict[str, str]:
    base, key, name = order.endpoint.base_url, order.endpoint.key, model_name(order)
    if api == "anthropic":
        return {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": name}
    if api == "gemini":
        return {"GOOGLE_GEMINI_BASE_URL": base, "GEMINI_API_KEY": key, "GEMINI_MODEL": name}
    return {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": name}


def _config(order: HarnessOrder, api: str) -> dict[str, Json]:
    return {
        "security": {"auth": {"selectedType": api}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {
            "enableManagedAutoMemory": False,
            "enableManagedAutoDream": False,
            "enableAutoSkill": False,
        },
        "model": {"generationConfig": {"contextWindowSize": order.endpoint.context_length}},
        "mcpServers": {
            name: {**server_json(server, url="httpUrl"), "trust": True}
            for name, server in order.mcp_servers.items()
        },
    }


HARNESS = Harness(
    name="qwen_code",
    version=VERSION,
    image="qwen_code",
    launch=launch,
    apis=APIS,
    mcp_servers=True,
    skills=True,
)
