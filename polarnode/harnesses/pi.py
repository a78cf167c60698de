"""Pi (`@earendil-works/pi-coding-agent`): reads its provider and the API to speak from
`~/.pi/agent/models.json`.

Measured with 1.6.0. It always streams, never asks for approval, and exits with 0 even when it did nothing.
Its MCP client, newer than this module, is not configured. If a stream ends cleanly inside a tool call's
arguments, pi executes the incomplete call; the model plane therefore breaks the connection instead.
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
    model_name,
    skill_files,
)

VERSION = "1.6.0"
BASE_PATHS = {
    "openai-completions": "/v1",
    "openai-responses": "/v1",
    "anthropic-messages": "",
    "google-generative-ai": "/v1beta",
}
APIS = tuple(BASE_PATHS)
MAX_REPLY_TOKENS = 8192  # per reply, if the context allows it
# These are pi's defaults in tokens. A small window has no room for both and a prompt.
RESERVE_TOKENS, RECENT_TOKENS = 16384, 20000


def launch(order: HarnessOrder) -> Launch:
    """`pi -p INSTRUCTION` with one provider, `local`, in its models file."""
    return _build_launch(order)


def resume(order: HarnessOrder) -> Launch:
    """The same with `--continue`: it continues the newest conversation of the workdir."""
    return _build_launch(order, "--continue")


def _build_launch(order: HarnessOrder, *flags: str) -> Launch:
    check_setting_names(order.settings, ("api",))
    name, folder = model_name(order), f"{order.home}/.pi/agent"
    own = {
        "LOCAL_API_KEY": order.endpoint.key,
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }
    return Launch(
        argv=("pi", *flags, "-p", argument(order.instruction), "--provider", "local", "--model", name),
        env=environment(order, own),
        files={
            f"{folder}/models.json": json_bytes(_models_config(order, name)),
            f"{folder}/settings.json": json_bytes(_settings(order.endpoint.context_length)),
            **skill_files(order, ".pi/agent/skills"),
        },
    )


def _settings(window: int) -> dict[str, Json]:
    """When to compact and how much to keep: at least half of the window stays for the prompt."""
    return {
        "compaction": {
            "reserveTokens": min(RESERVE_TOKENS, window // 4),
            "keepRecentTokens": min(RECENT_TOKENS, window // 4),
        }
    }


def _models_config(order: HarnessOrder, name: str) -> dict[str, Json]:
    api = choice(order.settings, "api", APIS)
    window = order.endpoint.context_length
    model: dict[str, Json] = {
        "id": name,
        "name": name,
        "reasoning": False,  # true makes pi send the developer role and reasoning_effort
        "input": ["text"],
        "contextWindow": window,
        "maxTokens": min(MAX_REPLY_TOKENS, window // 2),
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider: dict[str, Json] = {
        "baseUrl": f"{order.endpoint.base_url}{BASE_PATHS[api]}",
        "api": api,
        "apiKey": "$LOCAL_API_KEY",  # the variable, not the key
        "models": [model],
    }
    return {"providers": {"local": provider}}


HARNESS = Harness(
    name="pi",
    version=VERSION,
    image="pi",
    launch=launch,
    apis=APIS,
    exit_code_honest=False,
    skills=True,
    resume=resume,
)
