"""Qwen Code: speaks OpenAI Chat, Responses, Anthropic or Google, chosen by `--auth-type`; its environment
sets the endpoint, `~/.qwen/settings.json` the rest.

Measured with 0.24.4. Its first prompt is 78 kB; it gives a call up after 120 s without response headers. Its
background helpers (memory, follow-up suggestions) would make calls that are not part of the task and are off.
It allows an unknown model 32 000 tokens per answer. The window is set, and it compacts by that. When it uses
more than half of the container's memory, it would also replace old tool results by a sentence, at a different
call in each run.
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

VERSION = "0.24.4"
APIS = ("openai", "openai-responses", "anthropic", "gemini")


# At these shares of the container's memory it clears old tool results. With its defaults that happens at a
# different call in each run and splits lineages (5 of 12 sessions; 0 of 6 with these values). It accepts at
# most 0.98, and each value must be above the one before.
MEMORY_SHARES = {
    "QWEN_MEMORY_PRESSURE_SOFT": "0.96",
    "QWEN_MEMORY_PRESSURE_HARD": "0.97",
    "QWEN_MEMORY_PRESSURE_CRITICAL": "0.98",
}


def launch(order: HarnessOrder) -> Launch:
    """`qwen -y --prompt=INSTRUCTION` with all permissions granted: the container is the sandbox. The
    instruction is not put after a bare `--`, because qwen drops what follows one.
    """
    check_setting_names(order.settings, ("api",))
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
        **MEMORY_SHARES,
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
            name: {**mcp_server_json(server, url="httpUrl"), "trust": True}
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
