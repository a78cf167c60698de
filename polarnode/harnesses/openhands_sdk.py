"""OpenHands SDK: a library, so a short runner script drives its default agent, through litellm, without
streaming.

Measured with 1.58.2. It ends with its `finish` tool or with text without a tool call. It times a call out
after 300 s and retries, and an answer that is not streamed cannot be kept alive, so the limit is raised. A
context overflow is fatal to it, so its condenser is set to a share of the window.
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

VERSION = "1.58.2"
APIS = ("openai", "responses", "anthropic", "text")
CALL_S = 7200  # seconds per call, longer than any run budget
COMPACT_SHARE = 0.7  # share of the window: the kept messages, the summary and the answer must fit

# Runs in the container, with the image's Python; never imported here.
RUNNER = """\
import json
import sys

from openhands.sdk import LLM, Agent, AgentContext, Conversation
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.tools.preset.default import get_default_tools

order = json.load(open(sys.argv[1]))
llm = LLM(usage_id="agent", **order["llm"])
agent = Agent(
    llm=llm,
    tools=get_default_tools(enable_browser=False),
    mcp_config=order["mcp"],
    agent_context=AgentContext(load_user_skills=True),
    system_prompt_kwargs={"cli_mode": True},
    condenser=LLMSummarizingCondenser(
        llm=llm.model_copy(update={"usage_id": "condenser"}), max_tokens=order["compact_at"]
    ),
)
conversation = Conversation(agent=agent, workspace=order["workdir"], visualizer=None)
conversation.send_message(order["instruction"])
conversation.run()
status = conversation.state.execution_status.value
conversation.close()
print("ended:", status)
sys.exit(0 if status == "finished" else 1)
"""


def launch(order: HarnessOrder) -> Launch:
    """The runner with its order in a file: there the instruction is data, whatever it contains."""
    check_setting_names(order.settings, ("api",))
    runner, order_file = f"{order.home}/.openhands/run.py", f"{order.home}/.openhands/order.json"
    own = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "ANONYMIZED_TELEMETRY": "false",
    }
    sent: dict[str, Json] = {
        "instruction": order.instruction,
        "workdir": order.workdir,
        "compact_at": int(order.endpoint.context_length * COMPACT_SHARE),
        "llm": _llm_options(order, choice(order.settings, "api", APIS)),
        "mcp": {name: mcp_server_json(server) for name, server in order.mcp_servers.items()},
    }
    return Launch(
        argv=("/opt/openhands/bin/python", runner, order_file),
        env=environment(order, own),
        files={
            runner: RUNNER.encode(),
            order_file: json_bytes(sent),
            **skill_files(order, ".openhands/skills"),
        },
    )


def _llm_options(order: HarnessOrder, api: str) -> dict[str, Json]:
    base, name = order.endpoint.base_url, model_name(order)
    return {
        "model": f"{'anthropic' if api == 'anthropic' else 'openai'}/{name}",
        "base_url": base if api == "anthropic" else f"{base}/v1",
        "api_key": order.endpoint.key,
        "api_mode": "responses" if api == "responses" else "chat",
        "native_tool_calling": api != "text",
        "max_input_tokens": order.endpoint.context_length,
        "timeout": CALL_S,
    }


HARNESS = Harness(
    name="openhands_sdk",
    version=VERSION,
    image="openhands_sdk",
    launch=launch,
    apis=APIS,
    mcp_servers=True,
    skills=True,
)
