"""How an `sglang.Engine` is made: what must hold in this process before SGLang is imported, then the
constructor.

`run` is what runs in each of SGLang's scheduler processes (`Engine.run_scheduler_process_func`): SGLang's own
program with our constrained sampling and with weight updates that can be rolled back.

Imports of torch and sglang stay inside functions, because `multiprocessing` imports this package again in
every child before it sets that child up, and the parent imports it to name the function. Each private name of
SGLang or of the standard library that is used here comes with its reason.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polarnode.core.conversation import Json
from polarnode.engine.protocol import EXPERT_COUNTS, ExpertShape, Ready


def run(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's `run_scheduler_process` with our managers of grammars and weights."""
    from sglang.srt.managers import scheduler

    from polarnode.engine.embedded.grammars import LateGrammarManager
    from polarnode.engine.embedded.weights import Keeper

    scheduler.GrammarManager = LateGrammarManager
    scheduler.SchedulerWeightUpdaterManager = Keeper
    _report_host_tokens(scheduler.Scheduler)
    scheduler.run_scheduler_process(*args, **kwargs)


def _report_host_tokens(scheduler: Any) -> None:
    """Add the tokens of the cache in main memory to what a scheduler reports of itself at its start. SGLang
    has them in its metrics only, and computes the size itself.
    """
    reported = scheduler.get_init_info

    def get_init_info(self: Any) -> dict[str, Any]:
        return {**reported(self), "host_tokens": host_tokens(self.tree_cache)}

    scheduler.get_init_info = get_init_info


def host_tokens(tree_cache: Any) -> int:
    """The tokens that main memory holds for SGLang's prefix cache; 0 for a cache that is on the device
    only.
    """
    names = ("token_to_kv_pool_host", "full_kv_pool_host")  # of a plain tree, and of a unified one
    pools = [pool for name in names if (pool := getattr(tree_cache, name, None)) is not None]
    return int(pools[0].logical_size) if pools else 0


STUBS_FOLDER = Path(__file__).parent / "stubs"


def build(arguments: Mapping[str, Json], *, tag: str) -> Any:
    """Start an `sglang.Engine`. This blocks while the weights load, and an engine that cannot start may
    SIGKILL this process.
    """
    _name_semaphores(tag)
    if arguments["device"] == "cpu":
        ensure_torchvision()
    from sglang.srt.entrypoints.engine import Engine

    _name_load_file(tag)
    Engine.run_scheduler_process_func = staticmethod(run)
    return Engine(**arguments)


def describe(engine: Any) -> Ready:
    """What the node needs to know about a started engine."""
    import sglang

    manager = engine.tokenizer_manager
    # The public get_server_info needs a loop that is not running.
    info = engine._scheduler_init_result.scheduler_infos[0]
    return Ready(
        vocab_size=int(manager.model_config.vocab_size),
        context_length=int(manager.context_len),
        capacity=min(int(manager.context_len), int(info["max_req_input_len"])),
        max_total_tokens=int(info["max_total_num_tokens"]),
        host_tokens=int(info["host_tokens"]),
        weight_version=str(engine.server_args.weight_version),
        sglang_version=sglang.__version__,
        experts=_experts(manager.model_config.hf_text_config)
        if engine.server_args.enable_return_routed_experts
        else None,
        drafts=str(engine.server_args.speculative_algorithm or ""),
    )


def _experts(config: Any) -> ExpertShape:
    """The shape of what SGLang's capturer keeps: a row for every layer, including layers without experts."""
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    return ExpertShape(
        layers=int(config.num_hidden_layers),
        top_k=int(config.num_experts_per_tok),
        number=next(int(each) for each in counts if each),
    )


def _name_semaphores(tag: str) -> None:
    """Name the semaphores after our tag, so that node and lifeline can unlink them: SGLang's own shutdown
    kills the resource tracker that would.

    `_config` is private, and the only place where multiprocessing reads the prefix. Children inherit it.
    """
    multiprocessing.current_process()._config["semprefix"] = f"/{tag}"  # type: ignore[attr-defined]


def _name_load_file(tag: str) -> None:
    """Give the scheduler's load file our name, because SGLang creates it in /dev/shm under a random name and
    never unlinks it.
    """
    from sglang.srt.server_args import PortArgs

    made = PortArgs.init_new

    def init_new(*args: Any, **kwargs: Any) -> Any:
        ports = made(*args, **kwargs)
        ports.instance_id = tag
        return ports

    PortArgs.init_new = staticmethod(init_new)


def ensure_torchvision() -> None:
    """Put our stub on the path if torchvision cannot be imported. SGLang imports it for image models, and
    PyPI's wheel is a CUDA build that dies beside CPU torch.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, str(STUBS_FOLDER))
        importlib.invalidate_caches()
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(STUBS_FOLDER), os.environ.get("PYTHONPATH")))
        )
