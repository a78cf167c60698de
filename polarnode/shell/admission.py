"""Whether a task can run here, asked before any of its sessions exists: everything it names is found and tried dry.

The rule for whoever edits it: what a task can get wrong is refused at submission, with the field's path, and not hours later in a session's
outcome. Parts named by import path are other people's code: whatever they raise is a refusal, never an error of the node.
"""

from collections.abc import Collection

from attrs import frozen

from polarnode.errors import Refused, boundary
from polarnode.evaluators import registry as evaluators
from polarnode.evaluators.evaluator import Evaluator
from polarnode.harnesses import registry as harnesses
from polarnode.harnesses.harness import Harness
from polarnode.merge.builders import build
from polarnode.ports import Endpoint, Launch
from polarnode.shell.egress.rules import check_egress
from polarnode.shell.orders import harness_order
from polarnode.shell.podman.volumes import check_volumes
from polarnode.tasks import TaskSpec

# What a launch is tried with: the shape of a real endpoint, nobody's key.
DRY_URL, DRY_KEY, DRY_HOME = "http://127.0.0.1:8080", "sk-polarnode-dry", "/home/agent"


@frozen(kw_only=True)
class Admitted:
    """The parts a task named, found and fit for its settings."""

    harness: Harness
    evaluator: Evaluator


def admitted(
    spec: TaskSpec,
    *,
    model: str,
    context_length: int,
    allowed_imports: tuple[str, ...],
    unrouted: str | None = None,
    judges: Collection[str] | None = None,
    volumes: tuple[str, ...] | None = (),
    egress: tuple[str, ...] | None = (),
) -> Admitted:
    """What the task named. Refused, with the field's path, when it can not be had or does not take its settings.

    `judges` are the names of the node's, `volumes` the folders below which tasks may mount, `egress` the hosts they may reach, each None where it
    is not known yet; `unrouted` is why this node's engine tells no routed experts, None when it does.
    """
    if spec.carry.routed_experts and unrouted is not None:
        raise Refused(f"carry.routed_experts can not be had here: {unrouted}", path="$.carry.routed_experts")
    if volumes is not None:
        check_volumes(spec.runtime.volumes, volumes)
    if egress is not None:
        check_egress(spec.runtime.egress, egress)
    with boundary(Refused, "the harness can not be launched with these settings"):
        harness = harnesses.find(spec.harness, allowed_imports=allowed_imports)
        _try_launch(harness, spec, model, context_length)
    with boundary(Refused, "the evaluator can not work with this config"):
        evaluator = evaluators.find(spec.evaluator, allowed_imports=allowed_imports, judges=judges)
    build(spec.builder, (), allowed_imports=allowed_imports)  # a session that never called its model is built too
    return Admitted(harness=harness, evaluator=evaluator)


def _try_launch(harness: Harness, spec: TaskSpec, model: str, context_length: int) -> None:
    endpoint = Endpoint(base_url=DRY_URL, key=DRY_KEY, context_length=context_length, model=model)
    launch: object = harness.launch(harness_order(spec, endpoint, workdir=spec.runtime.workdir, home=DRY_HOME))
    if not isinstance(launch, Launch):
        raise Refused(f"the launch of harness {harness.name} gave {type(launch).__name__}: return a polarnode.ports.Launch", path="$.harness")
