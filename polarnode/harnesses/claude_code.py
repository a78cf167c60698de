"""Claude Code: speaks Anthropic Messages, configured by its environment alone.

Measured with 2.1.328: prompts of 50 kB and more, `system` entries in mid-conversation, tools that appear later. An unknown model name is
taken to have a million tokens of context, so the true window is told.
"""

from polarnode.harnesses.harness import Harness, argument, environment, model_name, only_settings
from polarnode.ports import HarnessOrder, Launch

VERSION = "2.1.328"


def launch(order: HarnessOrder) -> Launch:
    """`claude -p INSTRUCTION`, every permission given: the container is the sandbox."""
    only_settings(order.settings, ("bare",))
    bare = ("--bare",) if order.settings.get("bare") else ()
    argv = ("claude", *bare, "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose", "-p", argument(order.instruction))
    return Launch(argv=argv, env=environment(order, _own(order)), files={})


def _own(order: HarnessOrder) -> dict[str, str]:
    name = model_name(order)
    return {
        "ANTHROPIC_BASE_URL": order.endpoint.base_url,
        "ANTHROPIC_API_KEY": order.endpoint.key,
        "ANTHROPIC_MODEL": name,
        "ANTHROPIC_SMALL_FAST_MODEL": name,  # side calls too come to the one model
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a nonce in the system prompt, new with each request
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(order.endpoint.context_length),
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


HARNESS = Harness(name="claude_code", version=VERSION, image="claude_code", launch=launch)
