"""`session_completed`: 1 when the session is `completed` and its harness had called the model, else 0. Prefer a test of what it left."""

from collections.abc import Mapping

from polarnode.conversation import Json
from polarnode.errors import Refused
from polarnode.evaluators.evaluator import Evaluator, Finished
from polarnode.records import Verdict


async def evaluate(finished: Finished) -> Verdict:
    """Reward 1.0 or 0.0 by how the run ended."""
    completed = finished.outcome.status == "completed" and any(turn.state == "complete" for turn in finished.turns)
    return Verdict(reward=float(completed))


def check(config: Mapping[str, Json]) -> None:
    """There is nothing to set."""
    for name in config:
        raise Refused(f"session_completed has no setting {name}", path=f"$.evaluator.config.{name}")


EVALUATOR = Evaluator(name="session_completed", evaluate=evaluate, check=check, copies=False)
