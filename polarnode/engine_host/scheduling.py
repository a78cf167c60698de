"""What runs in each of SGLang's scheduler processes: SGLang's own program, with constrained sampling that needs no tokenizer of SGLang's.

Started by `building.build` through `Engine.run_scheduler_process_func`, the place SGLang keeps for this. Rule for whoever edits it: neither
torch nor sglang at the top, because the parent imports this module to name the function.
"""

from typing import Any


def run(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`, whose schedulers manage grammars as we do."""
    from sglang.srt.managers import scheduler

    from polarnode.engine_host.grammars import Grammars

    scheduler.GrammarManager = Grammars
    scheduler.run_scheduler_process(*args, **kwargs)
