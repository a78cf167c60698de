"""Hermes agent: speaks Chat, Responses or Anthropic and is configured by `~/.hermes/config.yaml`, written as
JSON, which is YAML.

Measured with 0.19.0. It asks its endpoint a dozen times what kind of server it is before the first call. It
strips text and sorts the keys of the arguments it sends back. It exits with 0 whatever happened.
"""

from polarnode.core.conversation import Json
from polarnode.core.ports import HarnessOrder, Launch
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

VERSION = "0.19.0"
BASE_PATHS = {"chat_completions": "/v1", "codex_responses": "/v1", "anthropic_messages": ""}
APIS = tuple(BASE_PATHS)
# In tokens. With a smaller configured window it does not start. If the real window is smaller, its call is
# refused, and it then sends less.
MIN_WINDOW = 64_000
MAX_REPLY_TOKENS = 16384  # per reply; its default of 65 536 leaves no room in a window of that size


def launch(order: HarnessOrder) -> Launch:
    """`hermes --oneshot=INSTRUCTION` with all approvals off: the container is the sandbox. Joined by `=`, the
    instruction is never parsed as an option.
    """
    check_setting_names(order.settings, ("api",))
    own = {"HERMES_HOME": f"{order.home}/.hermes", "HERMES_DISABLE_LAZY_INSTALLS": "1"}
    return Launch(
        argv=("hermes", "--yolo", f"--oneshot={order.instruction}"),
        env=environment(order, own),
        files={
            f"{order.home}/.hermes/config.yaml": json_bytes(_config(order)),
            **skill_files(order, ".hermes/skills"),
        },
    )


def _config(order: HarnessOrder) -> dict[str, Json]:
    window = order.endpoint.context_length
    api = choice(order.settings, "api", APIS)
    provider: dict[str, Json] = {
        "name": "local",
        "base_url": f"{order.endpoint.base_url}{BASE_PATHS[api]}",
        "api_key": order.endpoint.key,
        "api_mode": api,
    }
    return {
        "model": {
            "default": model_name(order),
            "provider": "custom:local",
            "context_length": max(window, MIN_WINDOW),  # set here, so that it does not ask the server
            "max_tokens": min(MAX_REPLY_TOKENS, window // 4),
        },
        "custom_providers": [provider],
        "approvals": {"mode": "off"},
        "security": {"allow_lazy_installs": False},
        "mcp_servers": {name: mcp_server_json(server) for name, server in order.mcp_servers.items()},
    }


HARNESS = Harness(
    name="hermes",
    version=VERSION,
    image="hermes",
    launch=launch,
    apis=APIS,
    exit_code_honest=False,
    mcp_servers=True,
    skills=True,
)
