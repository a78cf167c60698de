"""A node of real containers and harnesses whose engine says scripts: every session goes its own way, and each
tool result says what is in the workdir. `run` is `polarnode`, with its arguments.

What to say follows from the prompt and the session's name alone, so that forks of one state go different ways.
A case in the instruction ("This is case long-8 of pi.") gives the number of calls and the harness; `living` leaves a
process behind, `counting` one that counts, `slow` takes half a second a call.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

from attrs import define
from fork_bench import CONTEXT, model, shell
from hollow_node import HollowEngine
from matrix_cases import COMPLETE, Step
from steering import decoded, turns_so_far, written

from polarnode.cli.main import main
from polarnode.core.ports import GenerateOrder
from polarnode.node import opening

_CASE = re.compile(r"This is case (\w+)-(\d+) of (\w+)\.")
DIGEST = "$(cd /work; find . -type f | sort | xargs -r md5sum | md5sum | cut -c1-16)"
COUNTING = "n=0; while :; do n=$((n+1)); echo $n > /tmp/count; sleep 0.1; done"
COUNTED = 'sleep 0.3; until c=$(cat /tmp/count) && [ "$c" ]; do sleep 0.1; done; echo counted=$c'
# what a command does beside: none gives the same twice, and none leaves a process
WORK = (
    "date +%s%N >> notes.txt",
    "mktemp -p /work >> notes.txt; rm /work/tmp.*[a-m]",
    "mkdir -p src; echo $RANDOM > src/$RANDOM.txt; ls -la src",
    "python3 -c 'print(hash(str()), id(object()))' >> hash.txt; tail -1 hash.txt; false",
    "git init -q . 2>&1; git add -A; git -c user.email=a@b -c user.name=a commit -qm one; git log --oneline",
    "env | sort | head -5; cat /proc/uptime > up.txt; cat up.txt; ps 2>&1 | head -3",
    "sed -i 's/1/2/' notes.txt; touch -d yesterday notes.txt; chmod 600 notes.txt; stat -c %y notes.txt",
    "seq 1 400; dd if=/dev/urandom of=blob bs=1024 count=30 2>&1",
    "ln -sf notes.txt link; echo $$ >> notes.txt; cat link | tail -2; exit 3",
)


@define(eq=False)
class ForkingEngine(HollowEngine):
    """Says a shell command a turn, and a last word after as many as the case has."""

    def __attrs_post_init__(self) -> None:
        self.reply, self.chunk = self._said, 64
        self.vocab_size, self.context_length = model().tokenizer.vocab_size, CONTEXT

    def _said(self, order: GenerateOrder) -> Sequence[int]:
        loaded = model()
        text = decoded(order.prompt, loaded.tokenizer)
        thinks = loaded.template.opens_thinking(order.prompt)
        step = self._step(order, text, turns_so_far(order.prompt, loaded, calling=True))
        return written(step, loaded.tokenizer, loaded.family, in_thought=thinks)

    def _step(self, order: GenerateOrder, text: str, place: int) -> Step:
        found = _CASE.search(text)
        if found is None or place >= int(found[2]):
            done = found is not None and found[3] == "mini_swe_agent"
            return COMPLETE if done else Step("It is done.")
        number = blake2b(f"{order.affinity} {place}".encode()).digest()[0]
        work = WORK[number % len(WORK)]
        if found[1] == "living" and place == 1:
            work = "setsid sleep 600 > /dev/null 2>&1 < /dev/null &"
        if found[1] == "slow":
            work += "\nsleep 0.5"
        if found[1] == "counting":
            work = f"setsid sh -c '{COUNTING}' > /dev/null 2>&1 < /dev/null &" if place == 0 else COUNTED
        line = f"echo before={DIGEST}\n({work})\necho code=$? after={DIGEST}"
        return Step(f"Step {place}, {number}.", (shell(found[3], line),))


@asynccontextmanager
async def engines(*_: Any) -> AsyncIterator[ForkingEngine]:
    yield ForkingEngine()


def run() -> None:
    """The program `polarnode`, with this engine."""
    vars(opening)["_open_engines"] = engines
    main()
