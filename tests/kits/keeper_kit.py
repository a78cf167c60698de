"""A harness in memory that keeps its conversation in its home, and goes on with it when it is resumed."""

from collections.abc import Callable

import merge_toys as toys
from attrs import define, field
from fakes_runtime import Call, ProgramFunction
from session_kit import ask, session_of_call

from polarnode.core.conversation import Message
from polarnode.core.errors import RuntimeFault
from polarnode.core.task import HarnessSpec
from polarnode.providers.volatile import RESUME_MARKER

KEEPER_HARNESS = HarnessSpec(import_path="session_kit:KEEPING_HARNESS", command=("keeper",))
KEPT = "/home/agent/answered"  # how often it was answered


@define(eq=False)
class Keeper:
    """A harness of `turns` turns of `takes` seconds that keeps its conversation in its home. `says` stands in
    the place of its first message once it is resumed; `ends`: it then ends at once, with this code or error.
    `dies`: its container dies in these of its runs, from 0, before these turns, and `at_death` is called.
    `begun`: the turns that its runs began with.
    """

    turns: int = 4
    takes: float = 0.01
    at_death: Callable[[], None] = lambda: None
    says: str | None = None
    ends: int | Exception | None = None
    dies: dict[int, int] = field(factory=dict)
    begun: list[int] = field(factory=list)

    def program(self) -> ProgramFunction:
        async def program(call: Call) -> int:
            live, files = session_of_call(program, call), call.runtime.files
            resumed = call.argv[-1] == "--continue"
            assert call.stdin == (RESUME_MARKER if resumed else "do it").encode()
            history: list[Message] = [
                toys.user() if not resumed or self.says is None else toys.user(self.says)
            ]
            for turn in live.lineages.turns[: int(files.get(KEPT, b"0")) if resumed else 0]:
                assert turn.answer is not None
                history += [turn.answer.as_message(), toys.user("go on")]
            if resumed and isinstance(self.ends, Exception):
                raise self.ends
            if resumed and self.ends is not None:
                return self.ends
            self.begun.append(len(history) // 2)
            dies = self.dies.get(len(self.begun) - 1)
            for number in range(len(history) // 2, self.turns):
                if number == dies:
                    self.at_death()
                    raise RuntimeFault("the container died")
                turn = await ask(live, history, takes=self.takes)
                if turn is None or turn.answer is None:
                    return 1
                files[KEPT] = str(number + 1).encode()
                history += [turn.answer.as_message(), toys.user("go on")]
            return 0

        return program


def programs(keeper: Keeper | None = None) -> dict[str, ProgramFunction]:
    return {"keeper": (keeper or Keeper()).program()}
