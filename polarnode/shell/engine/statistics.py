"""What the engines can be asked at any time: frozen values, served at `/v1/status` and asserted in tests."""

from typing import Literal

from attrs import frozen

HostState = Literal["starting", "ready", "stale", "dead", "failed"]  # stale: waits for weights; dead: about to be restarted; failed: given up


@frozen(kw_only=True)
class HostStatistics:
    """One engine host. `in_flight` calls are ours, aborting ones included; `running` and `waiting` are the scheduler's own, 0.25 s old at most."""

    index: int
    state: HostState
    pid: int | None
    gpus: tuple[int, ...]
    in_flight: int
    running: int
    waiting: int
    token_usage: float
    restarts: int
    weight_version: str
    last_error: str | None


@frozen(kw_only=True)
class EngineStatistics:
    """All hosts. `context_length` is the most tokens one request may hold; `weight_version` is the node's; a `simulated` engine's answers are random."""

    hosts: tuple[HostStatistics, ...]
    vocab_size: int
    context_length: int
    weight_version: str
    paused: str | None
    kind: Literal["sglang", "simulated"] = "sglang"
