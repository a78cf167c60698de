"""Claude Code: speaks Anthropic Messages and is configured by its environment; MCP servers come in a file
named on its command line.

Measured with 2.1.332. Its prompts are 40 kB and more, with `system` entries in mid-conversation and tools
that appear later. It assumes a context of a million tokens for an unknown model, so the true window is set.
As root it refuses to skip permissions unless `IS_SANDBOX` is set.
"""

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

VERSION = "2.1.332"
APIS = ("anthropic",)
# It writes its conversation every 0.1 s, and less often on a busy machine. A copy that is made sooner lacks
# the last tool's result: 8 of 13 copies did that were made at once, and 1 of 13 after 0.25 s at a load of
# five times the cores.
SETTLES_S = 0.4


def launch(order: HarnessOrder) -> Launch:
    """`claude -p INSTRUCTION` with all permissions granted: the container is the sandbox."""
    return _build_launch(order)


def resume(order: HarnessOrder) -> Launch:
    """The same with `--continue`: it continues the newest conversation of the workdir, with the system prompt
    that it stored with that conversation.
    """
    return _build_launch(order, "--continue")


def _build_launch(order: HarnessOrder, *flags: str) -> Launch:
    check_setting_names(order.settings, ("api", "bare"))
    choice(order.settings, "api", APIS)
    servers = f"{order.home}/.claude/mcp-servers.json"
    bare = ("--bare",) if order.settings.get("bare") else ()
    mcp = ("--mcp-config", servers, "--strict-mcp-config") if order.mcp_servers else ()
    fixed = ("--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose")
    return Launch(
        argv=("claude", *flags, *bare, *mcp, *fixed, "-p", argument(order.instruction, special=("-", "/"))),
        env=environment(order, _own(order)),
        files={
            **({servers: _mcp_servers_file(order)} if mcp else {}),
            **skill_files(order, ".claude/skills"),
        },
    )


def _mcp_servers_file(order: HarnessOrder) -> bytes:
    return json_bytes(
        {
            "mcpServers": {
                name: mcp_server_json(server, kinds=("stdio", "http"))
                for name, server in order.mcp_servers.items()
            }
        }
    )


def _own(order: HarnessOrder) -> dict[str, str]:
    name = model_name(order)
    return {
        "ANTHROPIC_BASE_URL": order.endpoint.base_url,
        "ANTHROPIC_API_KEY": order.endpoint.key,
        "ANTHROPIC_MODEL": name,
        "ANTHROPIC_SMALL_FAST_MODEL": name,  # side calls use the same model
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # off: it puts a nonce into the system prompt of each request
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(order.endpoint.context_length),
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


HARNESS = Harness(
    name="claude_code",
    version=VERSION,
    image="claude_code",
    launch=launch,
    apis=APIS,
    mcp_servers=True,
    skills=True,
    resume=resume,
    settles_s=SETTLES_S,
)
