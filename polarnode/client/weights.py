"""New weights and held generation: what is asked, and what is answered.

The rule for whoever edits it: a version names one set of weights for ever, so an update may be asked for again; its answer comes when the
weights are served, which is as long as the engine takes.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from attrs import field, frozen

from polarnode.client.commands import Request, Script, ask
from polarnode.client.errors import ClientError, Unreachable, read_answer
from polarnode.client.patience import Patience, patiently
from polarnode.client.requests import JSON_BODY, asked, part
from polarnode.conversation import Json
from polarnode.wire import dump_json

logger = logging.getLogger(__name__)

Mode = Literal["in_place", "retract", "drain", "abort"]
PauseMode = Literal["in_place", "retract", "abort"]
Backend = Literal["nccl", "gloo"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]

UPDATES = "/v1/weights/updates"

UPDATE_SILENCE_S = (
    3600.0  # an update says nothing until it is served: `drain` waits for every call, and a checkpoint of a terabyte is read in minutes
)


@frozen(kw_only=True)
class HostReport:
    """What one engine host said; `seconds` since the update began."""

    index: int
    ok: bool = True
    message: str = ""
    seconds: float = 0.0


@frozen(kw_only=True)
class WeightsReport:
    """An update that is served. `created` is False when the version was served already."""

    version: str
    mode: str
    source: Mapping[str, Json]
    seconds: float
    hosts: tuple[HostReport, ...] = ()
    created: bool = True


@frozen(kw_only=True)
class WeightsUpdate:
    """An update of the history; `at` is seconds since the epoch."""

    version: str
    mode: str = ""
    source: Mapping[str, Json] = field(factory=dict)
    seconds: float = 0.0
    at: float = 0.0
    hosts: tuple[HostReport, ...] = ()


@frozen(kw_only=True)
class WeightsStatus:
    """The weights now: the version served, the one being loaded, how generation is held if it is, and updates, newest first."""

    version: str
    versions: tuple[str, ...] = ()
    updating: str | None = None
    paused: str | None = None
    released: tuple[str, ...] = ()
    updates: int = 0
    failures: int = 0
    last_seconds: float | None = None
    warning: str | None = None
    history: tuple[WeightsUpdate, ...] = ()


def update(version: str, source: Mapping[str, Json], mode: Mode) -> Request[WeightsReport]:
    body = dump_json({"version": version, "source": dict(source), "mode": mode})
    read = partial(read_answer, shape=WeightsReport)
    return Request(method="POST", path="/v1/weights", body=body, headers=JSON_BODY, read=read, silence_s=UPDATE_SILENCE_S)


def status() -> Request[WeightsStatus]:
    return Request(method="GET", path="/v1/weights", read=partial(read_answer, shape=WeightsStatus))


# ── an update of several requests ─────────────────────────────────────────────


@frozen(kw_only=True)
class UpdateOpened:
    """An update under way: it is given up by the node `idle_s` seconds after its last bucket."""

    update_id: str
    version: str = ""
    buckets: int = 0
    idle_s: float = 0.0


def push(version: str, source: Mapping[str, Json], buckets: Iterable[Mapping[str, Json]], mode: Mode, patience: Patience) -> Script[WeightsReport]:
    """Begin, one bucket after the other, and commit. Whatever fails before that, the node goes on with what it served."""
    opened = yield from ask(_begin(version, source, mode))
    try:
        for bucket in buckets:
            yield from ask(asked("POST", f"{UPDATES}/{part(opened.update_id)}/buckets", bucket, silence_s=UPDATE_SILENCE_S))
    except Exception:  # of whoever makes the buckets, too
        yield from _give_up(opened.update_id)
        raise
    read = partial(read_answer, shape=WeightsReport)
    commit = Request(method="POST", path=f"{UPDATES}/{part(opened.update_id)}/commit", read=read, silence_s=UPDATE_SILENCE_S)
    return (yield from patiently(commit, patience))


def _begin(version: str, source: Mapping[str, Json], mode: Mode) -> Request[UpdateOpened]:
    body, read = dump_json({"version": version, "source": dict(source), "mode": mode}), partial(read_answer, shape=UpdateOpened)
    return Request(method="POST", path=UPDATES, body=body, headers=JSON_BODY, read=read, silence_s=UPDATE_SILENCE_S)


def _give_up(update_id: str) -> Script[None]:
    try:
        yield from ask(asked("DELETE", f"{UPDATES}/{part(update_id)}"))
    except (ClientError, Unreachable) as error:
        if isinstance(error, ClientError) and error.status == 404:
            return  # it was given up already, for what a bucket held
        logger.warning("the node was not told to give up the update %s (%s): it does so by itself", update_id, error)


def join(name: str, address: str, port: int, world_size: int, rank_offset: int, backend: Backend) -> Request[dict[str, Any]]:
    said: dict[str, Json] = {"name": name, "address": address, "port": port, "world_size": world_size, "rank_offset": rank_offset}
    return asked("POST", "/v1/weights/groups", said | {"backend": backend}, silence_s=UPDATE_SILENCE_S)


def leave(name: str) -> Request[dict[str, Any]]:
    return asked("DELETE", f"/v1/weights/groups/{part(name)}")


# ── the engine ────────────────────────────────────────────────────────────────


def memory(verb: Literal["release", "resume"], tags: Sequence[MemoryTag] | None) -> Request[WeightsStatus]:
    body, read = dump_json({} if tags is None else {"tags": list(tags)}), partial(read_answer, shape=WeightsStatus)
    return Request(method="POST", path=f"/v1/engine/memory/{verb}", body=body, headers=JSON_BODY, read=read, silence_s=UPDATE_SILENCE_S)


def pause(mode: PauseMode) -> Request[WeightsStatus]:
    body, read = dump_json({"mode": mode}), partial(read_answer, shape=WeightsStatus)
    return Request(method="POST", path="/v1/engine/pause", body=body, headers=JSON_BODY, read=read, silence_s=UPDATE_SILENCE_S)


def resume() -> Request[WeightsStatus]:
    read = partial(read_answer, shape=WeightsStatus)
    return Request(method="POST", path="/v1/engine/resume", read=read, silence_s=UPDATE_SILENCE_S)
