"""New weights and held generation, as requests and scripts.

A version names one set of weights for ever, so an update may be retried. Its answer comes when the weights
are served, which takes as long as the engine does.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from polarnode.client.requests import ClientRequest, Script, ask, json_request, part, typed_request
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
    return typed_request(
        WeightsReport, "POST", "/v1/weights", _order(version, source, mode), silence_s=UPDATE_SILENCE_S
    )


def _order(version: str, source: Mapping[str, Json], mode: UpdateMode) -> dict[str, Json]:
    return {"version": version, "source": dict(source), "mode": mode}


def status() -> ClientRequest[WeightsStatus]:
    return typed_request(WeightsStatus, "GET", "/v1/weights")


# ── an update of several requests ─────────────────────────────────────────────


def push(
    version: str,
    source: Mapping[str, Json],
    buckets: Iterable[Mapping[str, Json]],
    mode: UpdateMode,
    patience: Patience,
) -> Script[WeightsReport]:
    """Begin an update, send each bucket, and commit. If anything fails before the commit, the node keeps its
    weights.
    """
    opened = yield from ask(
        typed_request(
            UpdateOpened, "POST", UPDATES, _order(version, source, mode), silence_s=UPDATE_SILENCE_S
        )
    )
    try:
        for bucket in buckets:
            yield from ask(
                json_request(
                    "POST", f"{UPDATES}/{part(opened.update_id)}/buckets", bucket, silence_s=UPDATE_SILENCE_S
                )
            )
    except Exception:  # including one raised while a bucket is made
        yield from _give_up(opened.update_id)
        raise
    commit = typed_request(
        WeightsReport, "POST", f"{UPDATES}/{part(opened.update_id)}/commit", silence_s=UPDATE_SILENCE_S
    )
    return (yield from patiently(commit, patience))


def _give_up(update_id: str) -> Script[None]:
    try:
        yield from ask(json_request("DELETE", f"{UPDATES}/{part(update_id)}"))
    except (ClientError, Unreachable) as error:
        if isinstance(error, ClientError) and error.status == 404:
            return  # the node gave it up already, because of a bucket's content
        logger.warning(
            "the node was not told to give up update %s (%s): it does so after its idle time",
            update_id,
            error,
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
    return json_request("POST", "/v1/weights/groups", body | {"backend": backend}, silence_s=UPDATE_SILENCE_S)


def leave(name: str) -> ClientRequest[dict[str, Any]]:
    return json_request("DELETE", f"/v1/weights/groups/{part(name)}")


# ── the engine ────────────────────────────────────────────────────────────────


def memory(
    verb: Literal["release", "resume"], tags: Sequence[MemoryTag] | None
) -> ClientRequest[WeightsStatus]:
    body: dict[str, Json] = {} if tags is None else {"tags": list(tags)}
    return typed_request(WeightsStatus, "POST", f"/v1/engine/memory/{verb}", body, silence_s=UPDATE_SILENCE_S)


def pause(mode: PauseMode) -> ClientRequest[WeightsStatus]:
    return typed_request(
        WeightsStatus, "POST", "/v1/engine/pause", {"mode": mode}, silence_s=UPDATE_SILENCE_S
    )


def resume() -> ClientRequest[WeightsStatus]:
    return typed_request(WeightsStatus, "POST", "/v1/engine/resume", silence_s=UPDATE_SILENCE_S)
