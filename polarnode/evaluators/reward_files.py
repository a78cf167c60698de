"""A file a test writes its reward to: what stood there is taken away first, and what it holds is read strictly.

A harness may have been in the same container before: a file, a link, a folder or a pipe of its own where the reward is to be. The rule for
whoever edits it: nothing is read that was not written after `clear`, no link is followed, and what is no finite number is no reward.
"""

import json
from collections.abc import Mapping, Sequence

from polarnode.conversation import Json
from polarnode.errors import EvaluatorError
from polarnode.evaluators.rewards import is_finite
from polarnode.evaluators.running import last_words
from polarnode.ports import Runtime

REWARD_BYTES = 64 * 1024  # a reward file is a number or a small object

# A folder the agent closed is opened by its owner; root in a container without capabilities may delete what is root's and nothing else.
OPEN = 'chmod -R u+rwX -- "$@" 2>/dev/null; exec rm -rf -- "$@"'


async def clear(runtime: Runtime, paths: Sequence[str], *, user: str | None = None) -> None:
    """Take away whatever stands at these paths; EvaluatorError where something stays."""
    ended = await runtime.run(["rm", "-rf", "--", *paths], user=user, workdir="/")
    for again in (user, "root"):
        if ended.exit_code == 0:
            return
        ended = await runtime.run(["sh", "-c", OPEN, "sh", *paths], user=again, workdir="/")
    if ended.exit_code != 0:
        raise EvaluatorError(f"what stood there before the test could not be removed, judge in a fresh_runtime: {last_words(ended.stderr)}")


async def read(runtime: Runtime, path: str) -> bytes | None:
    """The file's bytes; None where there is none, or something else than a plain file."""
    content = await runtime.read(path, limit=REWARD_BYTES + 1)
    if content is not None and len(content) > REWARD_BYTES:
        raise EvaluatorError(f"{path} is larger than {REWARD_BYTES} bytes: a reward is one number, or a small JSON object")
    return content


def parsed(content: bytes, path: str) -> Json:
    """The file as JSON; a number alone is JSON too."""
    try:
        value: Json = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvaluatorError(f"{path} is neither a number nor JSON: {content[:80]!r}") from error
    return value


def finite(value: Json, path: str, content: bytes) -> float:
    """A reward, which is a finite number and nothing that Python takes for one."""
    if not is_finite(value):
        raise EvaluatorError(f"{path} holds no finite number as its reward: {content[:80]!r}")
    return float(value)


def without(value: Mapping[str, Json], *names: str) -> dict[str, Json]:
    """What else a reward file told."""
    return {name: kept for name, kept in value.items() if name not in names}
