"""mini-swe-agent: one bash tool, litellm underneath, never streams.

Measured with 2.4.6: ends when the model runs `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`; retries even a 400 for minutes, so a spent
budget must end its process and not only refuse its calls.
"""

from polarnode.harnesses.harness import Harness, argument, choice, environment, model_name, only_settings
from polarnode.ports import HarnessOrder, Launch

VERSION = "2.4.6"
APIS = ("openai", "anthropic")


def launch(order: HarnessOrder) -> Launch:
    """`mini -t INSTRUCTION`, unattended; its own trajectory file is kept in the home for whoever wants to compare."""
    only_settings(order.settings, ("api",))
    api = choice(order.settings, "api", APIS)
    own = {
        "MSWEA_COST_TRACKING": "ignore_errors",  # an unknown model has no price, and mini would stop for it
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no look-up on the network at start
        **_endpoint(order, api),
    }
    argv = ("mini", "-m", f"{api}/{model_name(order)}", "-t", argument(order.instruction), "-y", "-l", "0", "--exit-immediately")
    return Launch(argv=(*argv, "-o", f"{order.home}/trajectory.json"), env=environment(order, own), files={})


def _endpoint(order: HarnessOrder, api: str) -> dict[str, str]:
    if api == "anthropic":
        return {"ANTHROPIC_API_BASE": order.endpoint.base_url, "ANTHROPIC_API_KEY": order.endpoint.key}
    return {"OPENAI_API_BASE": f"{order.endpoint.base_url}/v1", "OPENAI_API_KEY": order.endpoint.key}


HARNESS = Harness(name="mini_swe_agent", version=VERSION, image="mini_swe_agent", launch=launch)
