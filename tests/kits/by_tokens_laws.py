"""The laws of merged calls, held on the JSON that went in and the JSON that came out: written from the words
of the laws, sharing no code.

`broken_law` gives the first law that does not hold, in words, or None.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]


def float32(numbers: Sequence[float]) -> bytes:
    return array("f", numbers).tobytes()


def broken_law(calls: Sequence[Json], rows: Sequence[Json]) -> str | None:
    return next(_broken(calls, rows), None)


def _broken(calls: Sequence[Json], rows: Sequence[Json]) -> Iterator[str]:
    said = {(call["session_id"], call["turn_id"]): call for call in calls}
    trained: dict[Any, int] = dict.fromkeys(said, 0)
    for row in rows:
        yield from _broken_row(row, said, trained)
    for key, call in said.items():
        if call["sampled_ids"] and trained[key] != 1:
            yield f"turn {key} is trained {trained[key]} times"
    yield from _broken_order(calls, rows)


def _broken_row(row: Json, said: dict[Any, Json], trained: dict[Any, int]) -> Iterator[str]:
    tokens, mask, logprobs, at = row["token_ids"], row["loss_mask"], row["logprobs"], 0
    if (
        not len(tokens) == len(mask) == len(logprobs)
        or not row["turn_spans"]
        or row["turn_spans"][-1]["end"] != len(tokens)
    ):
        yield "a row's arrays have one length, and its last sample ends it"
    expected_mask, expected_logprobs, versions = [0] * len(tokens), [0.0] * len(tokens), []
    for span in row["turn_spans"]:
        key, start, end = (row["session_id"], span["turn"]), span["start"], span["end"]
        call = said.get(key)
        if (
            call is None
            or start < at
            or tokens[:start] != call["prompt_ids"]
            or tokens[start:end] != call["sampled_ids"]
        ):
            yield f"the row begins with the prompt and the sample of turn {key}"
            return
        if 1 in mask[start:end]:
            trained[key] += 1
            expected_mask[start:end] = [1] * (end - start)
            expected_logprobs[start:end] = call["logprobs"]
        elif trained[key] == 0:
            yield f"turn {key} is context here and trained in no row before"
        if call.get("weight_version") is not None:
            same = (
                bool(versions)
                and versions[-1]["end"] == start
                and versions[-1]["version"] == str(call["weight_version"])
            )
            begin = versions.pop()["start"] if same else start
            versions.append({"version": str(call["weight_version"]), "start": begin, "end": end})
        at = end
    if mask != expected_mask:
        yield "the mask is 1 on whole samples and 0 elsewhere"
    if float32(logprobs) != float32(expected_logprobs):
        yield "a logprob is the engine's where the mask is 1, and 0 elsewhere"
    if row["version_spans"] != versions:
        yield "the weights are those that were said"


def _broken_order(calls: Sequence[Json], rows: Sequence[Json]) -> Iterator[str]:
    sessions = list(dict.fromkeys(call["session_id"] for call in calls))
    place = {(call["session_id"], call["turn_id"]): number for number, call in enumerate(calls)}
    order = [
        (sessions.index(row["session_id"]), place[row["session_id"], row["turn_spans"][-1]["turn"]])
        for row in rows
    ]
    if order != sorted(set(order)):
        yield "sessions are in the order they appeared, rows in that of their last turns"


def fewest_rows(calls: Sequence[Json]) -> int:
    """Rows as the brief says it, by brute force: a call goes on from the longest text that begins its prompt,
    in its row if that is free.
    """
    rows = 0
    for session in {call["session_id"] for call in calls}:
        free: list[list[int]] = []  # the texts that rows end with
        for call in calls:
            if call["session_id"] != session or not call["sampled_ids"]:
                continue
            texts = [text for text in _texts(calls, session, call) if call["prompt_ids"][: len(text)] == text]
            longest = max(texts, key=len, default=None)
            if longest in free:
                free.remove(longest)
            else:
                rows += 1
            free.append(call["prompt_ids"] + call["sampled_ids"])
    return rows


def _texts(calls: Sequence[Json], session: Any, until: Json) -> Iterator[list[int]]:
    for call in calls:
        if call is until:
            return
        if call["session_id"] == session and call["sampled_ids"]:
            yield call["prompt_ids"] + call["sampled_ids"]
