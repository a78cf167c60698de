"""What an evaluator is: an async function from what a session left to a verdict.

It is given the runtime (the harness's own, its processes ended; or a clean one holding a copy of the workspace), what was recorded and the
task's config. It awaits nothing but the runtime, imports no Trio, and is ended by the session's post budget when it hangs.
"""

from collections.abc import Awaitable, Callable, Mapping

from attrs import frozen

from polarnode.conversation import Json
from polarnode.ports import Runtime
from polarnode.records import Outcome, Turn, Verdict


@frozen(kw_only=True)
class Finished:
    """A session whose run is over, as an evaluator sees it."""

    runtime: Runtime
    outcome: Outcome
    turns: tuple[Turn, ...]
    instruction: str
    config: Mapping[str, Json]
    metadata: Mapping[str, Json]


Evaluate = Callable[[Finished], Awaitable[Verdict]]


@frozen(kw_only=True)
class Evaluator:
    """One evaluator. `check` refuses a config it can not work with, when the task is submitted and not hours later."""

    name: str
    evaluate: Evaluate
    check: Callable[[Mapping[str, Json]], None]
