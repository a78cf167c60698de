"""Bare SGLang under the load of `gpu.py`'s throughput: `python gpu_bare.py ORDER.json`, in a process with the
environment of an engine host. The last line is tokens a second, by agents at once.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from polarnode.core.conversation import Sampling
from polarnode.engine.calls import sampling_parameters
from polarnode.engine.embedded.building import build


async def speed(engine: Any, count: int, order: dict[str, Any]) -> float:
    sampled = 0

    async def agent(number: int) -> None:
        nonlocal sampled
        for turn in range(order["rounds"]):
            chance = random.Random(1000 * turn + number)
            prompt = [chance.randrange(300, 1000) for _ in range(order["prompt"])]
            parameters = sampling_parameters(Sampling(temperature=1.0), max_tokens=order["sample"])
            stream = await engine.async_generate(
                input_ids=prompt,
                sampling_params=parameters,
                return_logprob=True,
                stream=True,
                rid=uuid4().hex,
            )
            async for piece in stream:
                sampled += len(piece["output_ids"])

    began = time.perf_counter()
    await asyncio.gather(*(agent(number) for number in range(count)))
    return round(sampled / (time.perf_counter() - began), 1)


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    engine = build(order["arguments"], tag="bare")

    async def rounds() -> dict[int, float]:
        agents = order["agents"]
        await speed(engine, agents[0], order)  # what is compiled or allocated first
        return {count: await speed(engine, count, order) for count in agents}

    found = engine.loop.run_until_complete(rounds())
    print(json.dumps(found), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
