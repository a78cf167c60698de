"""mini-swe-agent: one bash tool, through litellm, without streaming. With api `text` there is no tool, only a
fenced command in the answer.

Measured with 2.4.6. It ends when the model runs `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`. It has neither
MCP servers nor skills. It retries even a 400 for minutes, so when a budget is spent its process must be
ended, not only its calls refused.
"""

from polarnode.core.ports import HarnessOrder, Launch
from polarnode.harnesses.harness import (
    Harness,
    argument,
    check_setting_names,
    choice,
    environment,
    model_name,
)

VERSION = "2.4.6"
APIS = ("openai", "anthropic", "responses", "text")
MODEL_CLASS_FLAGS = {
    "responses": ("--model-class", "litellm_response"),
    "text": ("--model-class", "litellm_textbased"),
}
# Seconds per call, longer than any run budget. By default it gives up after 600 and retries.
CALL_S = 7200


def launch(order: HarnessOrder) -> Launch:
    """`mini --task=INSTRUCTION`, unattended. Its own trajectory file is kept in the home, for comparison."""
    check_setting_names(order.settings, ("api",))
    api = choice(order.settings, "api", APIS)
    own = {
        "MSWEA_COST_TRACKING": "ignore_errors",  # mini stops on a model without a price
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no network look-up at start
        **_endpoint(order, api),
    }
    model = f"{'anthropic' if api == 'anthropic' else 'openai'}/{model_name(order)}"
    config = (
        "-c",
        "mini_textbased.yaml" if api == "text" else "mini.yaml",
        "-c",
        f"model.model_kwargs.timeout={CALL_S}",
    )
    fixed = ("-y", "-l", "0", "--exit-immediately", "-o", f"{order.home}/trajectory.json")
    argv = (
        "mini",
        "-m",
        model,
        *MODEL_CLASS_FLAGS.get(api, ()),
        *config,
        *fixed,
        f"--task={argument(order.instruction, special=())}",
    )
    return Launch(argv=argv, env=environment(order, own), files={})


def _endpoint(order: HarnessOrder, api: str) -> dict[str, str]:
    if api == "anthropic":
        return {"ANTHROPIC_API_BASE": order.endpoint.base_url, "ANTHROPIC_API_KEY": order.endpoint.key}
    return {"OPENAI_API_BASE": f"{order.endpoint.base_url}/v1", "OPENAI_API_KEY": order.endpoint.key}


HARNESS = Harness(name="mini_swe_agent", version=VERSION, image="mini_swe_agent", launch=launch, apis=APIS)
