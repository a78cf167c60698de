"""New weights and held generation, as requests and scripts.

A version names one set of weights for ever, so an update may be retried. Its answer comes when the weights
are served, which takes as long as the engine does.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from polarnode.client.requests import ClientRequest, Script, answered, ask, asked, part
from polarnode.client.scripts import Patience, patiently
from polarnode.client.values import ClientError, Unreachable
from polarnode.core.conversation import Json
from polarnode.core.weights import (
    Backend,
    MemoryTag,
    PauseMode,
    UpdateMode,
    UpdateOpened,
    WeightsReport,
    WeightsStatus,
)

logger = logging.getLogger(__name__)

UPDATES = "/v1/weights/updates"

UPDATE_SILENCE_S = (
    # an update is silent until it is served: `drain` waits for every call, and a checkpoint of a terabyte
    # is read in minutes
    3600.0
)


def update(version: str, source: Mapping[str, Json], mode: UpdateMode) -> ClientRequest[WeightsReport]:
    return answered(
        WeightsReport, "POST", "/v1/weights", _order(version, source, mode), silence_s=UPDATE_SILENCE_S
    )


def _order(version: str, source: Mapping[str, Json], mode: UpdateMode) -> dict[str, Json]:
    return {"version": version, "source": dict(source), "mode": mode}


def status() -> ClientRequest[WeightsStatus]:
    return answered(WeightsStatus, "GET", "/v1/weights")


# ── an update of several requests ─────────────────────────────────────────────


def push(
    version: str,
    source: Mapping[str, Json],
    buckets: Iterable[Mapping[str, Json]],
    mode: UpdateMode,
    patience: Patience,
) -> Script[WeightsReport]:
    """Begin, one bucket after the other, and commit. Whatever fails before that, the node goes on with what
    it served.
    """
    opened = yield from ask(
        answered(UpdateOpened, "POST", UPDATES, _order(version, source, mode), silence_s=UPDATE_SILENCE_S)
    )
    try:
        for bucket in buckets:
            yield from ask(
                asked(
                    "POST", f"{UPDATES}/{part(opened.update_id)}/buckets", bucket, silence_s=UPDATE_SILENCE_S
                )
            )
    except Exception:  # of whoever makes the buckets, too
        yield from _give_up(opened.update_id)
        raise
    commit = answered(
        WeightsReport, "POST", f"{UPDATES}/{part(opened.update_id)}/commit", silence_s=UPDATE_SILENCE_S
    )
    return (yield from patiently(commit, patience))


def _give_up(update_id: str) -> Script[None]:
    try:
        yield from ask(asked("DELETE", f"{UPDATES}/{part(update_id)}"))
    except (ClientError, Unreachable) as error:
        if isinstance(error, ClientError) and error.status == 404:
            return  # it was given up already, for what a bucket held
        logger.warning(
            "the node was not told to give up the update %s (%s): it does so by itself", update_id, error
        )


def join(
    name: str, address: str, port: int, world_size: int, rank_offset: int, backend: Backend
) -> ClientRequest[dict[str, Any]]:
    body: dict[str, Json] = {
        "name": name,
        "address": address,
        "port": port,
        "world_size": world_size,
        "rank_offset": rank_offset,
    }
    return asked("POST", "/v1/weights/groups", body | {"backend": backend}, silence_s=UPDATE_SILENCE_S)


def leave(name: str) -> ClientRequest[dict[str, Any]]:
    return asked("DELETE", f"/v1/weights/groups/{part(name)}")


# ── the engine ────────────────────────────────────────────────────────────────


def memory(
    verb: Literal["release", "resume"], tags: Sequence[MemoryTag] | None
) -> ClientRequest[WeightsStatus]:
    body: dict[str, Json] = {} if tags is None else {"tags": list(tags)}
    return answered(WeightsStatus, "POST", f"/v1/engine/memory/{verb}", body, silence_s=UPDATE_SILENCE_S)


def pause(mode: PauseMode) -> ClientRequest[WeightsStatus]:
    return answered(WeightsStatus, "POST", "/v1/engine/pause", {"mode": mode}, silence_s=UPDATE_SILENCE_S)


def resume() -> ClientRequest[WeightsStatus]:
    return answered(WeightsStatus, "POST", "/v1/engine/resume", silence_s=UPDATE_SILENCE_S)
