"""New weights through the HTTP route on real SGLang, in the middle of a sample: each token's logprob is that
of the weights its span names.

The reference is transformers'. In place, the keys and values of what was read before stay the old weights':
so does the reference's cache.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_reference import TOLERANCE, Reference, difference, host_pid, settings, temporary
from fakes_engine import joined, order, sample
from weights_kit import Plane, Trainer, disk, free_port, open_trainer, open_weights_plane

from polarnode.core.ports import Chunk

__all__ = ["temporary"]  # a fixture, asked for by name
# torch and transformers warn of themselves
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

PROMPT = list(range(100, 200))
TOKENS = 1500  # seconds of sampling, within which an update must begin


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "old", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model") / "new", seed=2)


async def test_weights_update_in_every_way(
    old: Reference, new: Reference, tmp_path: Path, temporary: Path
) -> None:
    with trio.fail_after(900), open_trainer() as trainer:
        async with open_weights_plane(settings(old, tmp_path), tmp_path / "journal") as plane:
            await in_place_goes_on_with_the_old_cache(plane, old, new)
            await retract_reads_again(plane, new, old)
            await tensors_are_taken_by_handle(plane, trainer, new)
            await what_is_no_whole_model_leaves_the_old_weights(plane, trainer, old, new)
            await buckets_come_one_by_one(plane, trainer, old)
            await a_group_is_joined_and_sends(plane, trainer, new)
            await slimes_own_requests_serve_a_version_or_none(plane, trainer, old)
            await an_abort_ends_turns_and_drains_wait(plane, old)
            await a_host_that_lost_its_tensors_waits(plane, trainer, new, old)


async def swapped(plane: Plane, version: str, source: dict[str, Any], mode: str) -> list[Chunk]:
    """A sample in whose middle the weights change."""
    chunks: list[Chunk] = []
    async with plane.engines.generate(order(PROMPT, max_tokens=TOKENS, temperature=1.0)) as stream:
        chunks.append(await stream.__anext__())
        await plane.update(version, source, mode)
        chunks += [chunk async for chunk in stream]
    return chunks


async def in_place_goes_on_with_the_old_cache(plane: Plane, old: Reference, new: Reference) -> None:
    chunks = await swapped(plane, "1", disk(new.path), "in_place")
    before, after = chunks[-1].version_spans
    assert (before.version, before.start, after.version, after.end) == ("0", 0, "1", TOKENS)
    sampled = joined(chunks)
    assert difference(chunks, old.logprobs(PROMPT, sampled), before) < TOLERANCE
    theirs = [*[0.0] * after.start, *with_cache_of(old, new, sampled, after.start)]
    assert difference(chunks, theirs, after) < TOLERANCE
    # so the cache did stay, and this test can tell
    assert difference(chunks, new.logprobs(PROMPT, sampled), after) > TOLERANCE
    # whoever comes after finds none of it
    assert joined(await sample(plane.engines, order(PROMPT))) == new.greedy(PROMPT, 8)


def with_cache_of(old: Reference, new: Reference, sampled: Sequence[int], at: int) -> list[float]:
    """Logprobs of `sampled[at:]` by the new weights, which read their own tokens, behind keys and values of
    the old ones.
    """
    import torch

    with torch.no_grad():
        cache = old.model(torch.tensor([[*PROMPT, *sampled[: at - 1]]]), use_cache=True).past_key_values
        logits = new.model(
            torch.tensor([list(sampled[at - 1 : -1])]), past_key_values=cache, use_cache=True
        ).logits[0]
    return [
        float(row[token]) for row, token in zip(torch.log_softmax(logits, dim=-1), sampled[at:], strict=True)
    ]


async def retract_reads_again(plane: Plane, old: Reference, new: Reference) -> None:
    chunks = await swapped(plane, "2", disk(new.path), "retract")
    before, after = chunks[-1].version_spans
    assert (before.version, after.version, after.end) == ("1", "2", TOKENS)
    sampled = joined(chunks)
    assert difference(chunks, old.logprobs(PROMPT, sampled), before) < TOLERANCE
    assert difference(chunks, new.logprobs(PROMPT, sampled), after) < TOLERANCE


async def tensors_are_taken_by_handle(plane: Plane, trainer: Trainer, new: Reference) -> None:
    names = await trainer.ask(do="load", path=str(new.path))
    payload = await trainer.ask(do="payload", names=names)
    chunks = await swapped(plane, "3", {"kind": "tensor", "buckets": [{"payloads": [payload]}]}, "retract")
    assert difference(chunks, new.logprobs(PROMPT, joined(chunks)), chunks[-1].version_spans[-1]) < TOLERANCE
    assert (await plane.told())["history"][0]["source"] == {"kind": "tensor", "buckets": "1"}


async def what_is_no_whole_model_leaves_the_old_weights(
    plane: Plane, trainer: Trainer, old: Reference, new: Reference
) -> None:
    """`new` is served. What comes is of `old`, and only found wanting when most of it is loaded."""
    names = await trainer.ask(do="load", path=str(old.path))
    missing = {
        "kind": "tensor",
        "buckets": [{"payloads": [await trainer.ask(do="payload", names=names[:-1])]}],
    }
    await refused(plane, missing, f"{names[-1]} is missing")
    first = await trainer.ask(do="payload", names=names[:3])
    name = await trainer.ask(do="spoil", name=names[3], shape=[3, 3])
    spoiled = await trainer.ask(do="payload", names=[name])
    await refused(
        plane,
        {"kind": "tensor", "buckets": [{"payloads": [first]}, {"payloads": [spoiled]}]},
        "has shape [3, 3]",
    )
    await refused(
        plane, {"kind": "tensor", "buckets": [{"payloads": ["AAAA"]}]}, "the previous ones are served"
    )
    async with plane.engines.generate(order(PROMPT, max_tokens=TOKENS, temperature=1.0)) as stream:
        chunks = [await stream.__anext__()]
        await refused(plane, missing, f"{names[-1]} is missing")
        chunks += [chunk async for chunk in stream]
    assert [span.version for span in chunks[-1].version_spans] == ["3"]
    assert difference(chunks, new.logprobs(PROMPT, joined(chunks))) < TOLERANCE
    assert plane.engines.versions[-1] == "3"


async def refused(plane: Plane, source: dict[str, Any], sentence: str) -> None:
    answer = await plane.node.post("/v1/weights", {"version": "never", "source": source})
    assert (answer.status, sentence in answer.text) == (400, True), answer.text


async def buckets_come_one_by_one(plane: Plane, trainer: Trainer, old: Reference) -> None:
    names = await trainer.ask(do="load", path=str(old.path))
    begun = (
        await plane.node.post(
            "/v1/weights/updates", {"version": "4", "mode": "retract", "source": {"kind": "tensor"}}
        )
    ).json()
    where = f"/v1/weights/updates/{begun['update_id']}"
    for count, part in enumerate((names[:5], names[5:]), 1):
        payload = await trainer.ask(do="payload", names=part, flat=True)
        added = await plane.node.post(
            f"{where}/buckets", {"payloads": [payload], "layout": "flattened_bucket"}
        )
        assert (added.status, added.json()["buckets"]) == (200, count), added.text
    assert (await plane.told())["updating"] == "4"
    assert (await plane.node.call("POST", f"{where}/commit")).json()["version"] == "4"
    assert joined(await sample(plane.engines, order(PROMPT))) == old.greedy(PROMPT, 8)


async def a_group_is_joined_and_sends(plane: Plane, trainer: Trainer, new: Reference) -> None:
    names = await trainer.ask(do="load", path=str(new.path))
    port = free_port()
    body = {"address": "127.0.0.1", "port": port, "world_size": 2, "backend": "gloo"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: trainer.ask(do="join", port=port))
        joined_group = await plane.node.post("/v1/weights/groups", body)
        assert joined_group.status == 201, joined_group.text
    bucket = await trainer.ask(do="bucket", names=names)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: trainer.ask(do="send", names=names))
        await plane.update("5", {"kind": "distributed", "buckets": [bucket]})
    assert joined(await sample(plane.engines, order(PROMPT))) == new.greedy(PROMPT, 8)
    assert (await plane.node.call("DELETE", "/v1/weights/groups/weights")).status == 200


async def slimes_own_requests_serve_a_version_or_none(plane: Plane, trainer: Trainer, old: Reference) -> None:
    """What slime with two pipeline stages sends to an engine (THUDM/slime 624b824a8,
    slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py), while a turn is sampled:
    a group for each stage, pause_generation, flush_cache, buckets in turn, continue_generation. `new` is
    served before. The first time the second stage's last bucket does not come.
    """
    served = plane.engines.versions[-1]
    names = await trainer.ask(do="load", path=str(old.path))
    with open_trainer() as other:
        await other.ask(do="load", path=str(old.path))
        stages = ((trainer, names[:5]), (other, names[5:]))
        for number, (stage, _) in enumerate(stages):
            port = free_port()
            body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: stage.ask(do="join", port=port, name=f"slime-pp_{number}"))  # noqa: B023
                await sglang(
                    plane,
                    "init_weights_update_group",
                    {**body, "group_name": f"slime-pp_{number}", "backend": "gloo"},
                )
        for version, last, status in (("41", -1, 400), ("42", None, 200)):
            async with plane.engines.generate(order(PROMPT, max_tokens=1000, temperature=1.0)) as stream:
                chunks = [await stream.__anext__()]
                await sglang(plane, "pause_generation", {})
                assert (await plane.node.get("/flush_cache")).status == 200
                for number, (stage, part) in enumerate(stages):
                    bucket = await stage.ask(do="bucket", names=part[:last] if number else part)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lambda: stage.ask(do="send", names=bucket["names"]))  # noqa: B023
                        sent = {"group_name": f"slime-pp_{number}", "flush_cache": False}
                        await sglang(
                            plane,
                            "update_weights_from_distributed",
                            {**bucket, **sent, "weight_version": version},
                        )
                done = await plane.node.post("/continue_generation", {})
                assert done.status == status, done.text
                chunks += [chunk async for chunk in stream]
            if status == 400:
                assert f"{names[-1]} is missing" in done.text
                assert [span.version for span in chunks[-1].version_spans] == [served]
        for number in (0, 1):
            await sglang(plane, "destroy_weights_update_group", {"group_name": f"slime-pp_{number}"})
    before, after = chunks[-1].version_spans
    assert (before.version, after.version, after.end) == (served, "42", 1000)
    assert difference(chunks, old.logprobs(PROMPT, joined(chunks)), after) < TOLERANCE
    assert joined(await sample(plane.engines, order(PROMPT))) == old.greedy(PROMPT, 8)
    assert (await plane.node.get("/get_weight_version")).json() == {"weight_version": "42"}


async def sglang(plane: Plane, route: str, body: dict[str, Any]) -> None:
    answer = await plane.node.post(f"/{route}", body)
    assert answer.status == 200, answer.text


async def an_abort_ends_turns_and_drains_wait(plane: Plane, old: Reference) -> None:
    chunks = await swapped(plane, "6", disk(old.path), "abort")
    assert chunks[-1].finish_reason == "abort"
    assert [span.version for span in chunks[-1].version_spans] == ["42"]
    drained = await swapped(plane, "7", disk(old.path), "drain")
    assert ([span.version for span in drained[-1].version_spans], len(joined(drained))) == (["6"], TOKENS)
    assert (await sample(plane.engines, order(PROMPT)))[-1].version_spans[0].version == "7"


async def a_host_that_lost_its_tensors_waits(
    plane: Plane, trainer: Trainer, new: Reference, old: Reference
) -> None:
    payload = await trainer.ask(do="payload", names=await trainer.ask(do="load", path=str(new.path)))
    await plane.update("8", {"kind": "tensor", "buckets": [{"payloads": [payload]}]})
    os.kill(host_pid(plane.engines), signal.SIGKILL)
    while plane.engines.statistics().hosts[0].state != "stale":  # noqa: ASYNC110 - a test looks from outside
        await trio.sleep(0.1)
    await plane.update("9", disk(old.path))
    assert joined(await sample(plane.engines, order(PROMPT))) == old.greedy(PROMPT, 8)
