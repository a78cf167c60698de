"""`shell`: any program with a configurable base URL. The task gives the command as argv; no shell interprets
it.

In each argument `{instruction}`, `{base_url}`, `{key}`, `{model}` and `{workdir}` are replaced, once and
literally. The instruction and the model endpoint are also in the environment, the endpoint under the names
that the official SDKs read, so most programs need no arguments.
"""

import re

from polarnode.core.errors import Refused
from polarnode.core.ports import HarnessOrder, Launch
from polarnode.harnesses.harness import Harness, check_setting_names, environment, model_name


def launch(order: HarnessOrder) -> Launch:
    """The task's own command, with the model endpoint in its environment."""
    check_setting_names(order.settings, ())
    if not order.command:
        raise Refused(
            'the shell harness needs a command, such as ["python3", "agent.py"]', path="$.harness.command"
        )
    return Launch(
        argv=tuple(_filled(part, order) for part in order.command),
        env=environment(order, endpoint_environment(order)),
        files={},
    )


def endpoint_environment(order: HarnessOrder) -> dict[str, str]:
    """The model endpoint in the variables that the providers' SDKs read."""
    base, key, name = order.endpoint.base_url, order.endpoint.key, model_name(order)
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": name,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": name,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": key,
        "GEMINI_MODEL": name,
        "POLARNODE_INSTRUCTION": order.instruction,
    }


def _filled(part: str, order: HarnessOrder) -> str:
    values = {
        "instruction": order.instruction,
        "base_url": order.endpoint.base_url,
        "key": order.endpoint.key,
        "model": model_name(order),
        "workdir": order.workdir,
    }
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), part)


HARNESS = Harness(name="shell", version=None, image="base", launch=launch)
