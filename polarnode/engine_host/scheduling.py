"""What runs in each of SGLang's scheduler processes: SGLang's own program, with constrained sampling that needs no tokenizer of SGLang's, and
with weight updates that have a way back.

Started by `building.build` through `Engine.run_scheduler_process_func`, the place SGLang keeps for this. Rule for whoever edits it: neither
torch nor sglang at the top, because the parent imports this module to name the function.
"""

from typing import Any


def run(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`, whose schedulers manage grammars and weights as we do."""
    from sglang.srt.managers import scheduler

    from polarnode.engine_host.grammars import Grammars
    from polarnode.engine_host.weights import Keeper

    scheduler.GrammarManager = Grammars
    scheduler.SchedulerWeightUpdaterManager = Keeper
    scheduler.run_scheduler_process(*args, **kwargs)
