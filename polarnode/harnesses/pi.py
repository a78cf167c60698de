"""Pi (`@mariozechner/pi-coding-agent`): reads its provider from `~/.pi/agent/models.json` and speaks the API named there.

Measured with 0.73.1: always streams, never asks for approval, exits 0 even when it did nothing, so its exit code says little.
"""

import json

from polarnode.conversation import Json
from polarnode.harnesses.harness import Harness, argument, choice, environment, model_name, only_settings
from polarnode.ports import HarnessOrder, Launch

VERSION = "0.73.1"
APIS = ("openai-completions", "anthropic-messages")
MAX_REPLY_TOKENS = 8192  # what pi asks for per reply where the context allows it


def launch(order: HarnessOrder) -> Launch:
    """`pi -p INSTRUCTION` with one provider, `local`, in its models file."""
    only_settings(order.settings, ("api",))
    name = model_name(order)
    own = {"LOCAL_API_KEY": order.endpoint.key, "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}
    return Launch(
        argv=("pi", "-p", argument(order.instruction), "--provider", "local", "--model", name),
        env=environment(order, own),
        files={f"{order.home}/.pi/agent/models.json": json.dumps(_models(order, name), indent=1).encode()},
    )


def _models(order: HarnessOrder, name: str) -> dict[str, Json]:
    api = choice(order.settings, "api", APIS)
    base = order.endpoint.base_url
    provider: dict[str, Json] = {
        "baseUrl": base if api == "anthropic-messages" else f"{base}/v1",
        "api": api,
        "apiKey": "LOCAL_API_KEY",  # the name of the variable, not the key
        "models": [_model(order, name)],
    }
    return {"providers": {"local": provider}}


def _model(order: HarnessOrder, name: str) -> dict[str, Json]:
    return {
        "id": name,
        "name": name,
        "reasoning": False,  # true makes pi send the developer role and reasoning_effort
        "input": ["text"],
        "contextWindow": order.endpoint.context_length,
        "maxTokens": min(MAX_REPLY_TOKENS, order.endpoint.context_length // 2),
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }


HARNESS = Harness(name="pi", version=VERSION, image="pi", launch=launch)
