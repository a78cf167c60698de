"""What an evaluator is: an async function from what a session left to a verdict.

It is given the runtime (the harness's own, its processes ended; or a clean one holding a copy of the workspace), what was recorded and the
task's config. It awaits nothing but runtimes and judges, imports no Trio, and is ended by the session's post budget when it hangs.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping

from attrs import frozen

from polarnode.conversation import Json
from polarnode.ports import Judge, Runtime
from polarnode.records import Outcome, Turn, Verdict


async def _prepared() -> None:
    """Nothing is left to do."""


@frozen(kw_only=True)
class Finished:
    """A session whose run is over, as an evaluator sees it.

    `runtime` is where to judge, `left` what the harness left, its processes ended: the same one unless the evaluator has a fresh one.
    `judge` gives the judge of a name the node's config knows, and refuses any other with an EvaluatorError. `prepare` runs the task's
    `eval_prepare` in `runtime`: to be awaited by an evaluator that takes the agent's work into a fresh one itself (`copies` False), once it
    lies there; for any other they have run already.
    """

    runtime: Runtime
    left: Runtime
    judge: Callable[[str], Judge]
    outcome: Outcome
    turns: tuple[Turn, ...]
    instruction: str
    config: Mapping[str, Json]
    metadata: Mapping[str, Json]
    prepare: Callable[[], Awaitable[None]] = _prepared


Evaluate = Callable[[Finished], Awaitable[Verdict]]


@frozen(kw_only=True)
class Allowed:
    """What the node's config lets a task name: modules below these prefixes, these judges. None: whoever asks knows no judges, and none is refused."""

    imports: tuple[str, ...] = ()
    judges: Collection[str] | None = None


@frozen(kw_only=True)
class Evaluator:
    """One evaluator. `check` refuses a config it can not work with, when the task is submitted and not hours later.

    `fresh`: it always judges in a fresh runtime. `copies`: the workdir as the harness left it is copied into a fresh runtime; False where it
    takes what it wants from `left` itself.
    """

    name: str
    evaluate: Evaluate
    check: Callable[[Mapping[str, Json]], None]
    fresh: bool = False
    copies: bool = True
