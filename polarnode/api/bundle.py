"""The node's page with the trajectories of a file in place of a node, as files that any web server can serve.

A bundle holds the page's own files, an `index.html` that tells the page to read files, and `data/…`: the
answers that a node would give, made from a `trajectories.jsonl`. No code runs on the server. The page asks
for these files by the same paths as for a node's answers (`web/ui/bundle.js`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from attrs import define, evolve, field

from polarnode.api.page import POLICY, PageFile, read_page_files
from polarnode.core.codec.json import dump_json, plain
from polarnode.core.codec.trajectories import read_trajectory, trajectory_json
from polarnode.core.conversation import Json
from polarnode.core.errors import Refused
from polarnode.core.trajectory import Trajectory
from polarnode.groups.group import DEFAULT_GROUP_SPEC, facts_of, group_json, judged
from polarnode.journal.finished_groups import group_advantages
from polarnode.tokens.pieces import pieces_of

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")  # ids that can be names of files
_INDEX_FILE: Final = "index.html"


@define(eq=False)
class Bundle(Mapping[str, PageFile]):
    """The files of a bundle by their path. The files of a session are made when they are read, so that a
    large file of trajectories is in memory only once.

    `rows` are the file's JSON lines. Raises Refused for a line that is not a trajectory, for an id that
    cannot be a file name, and for an id that occurs twice.
    """

    title: str
    token_bytes: Callable[[int], bytes]
    _sessions: dict[str, Mapping[str, Any]]
    _tasks: dict[str, list[Mapping[str, Any]]] = field(init=False)  # the sessions of each task
    _forks: dict[str, list[Json]] = field(init=False)  # records of forks, by their parent
    _files: Mapping[str, PageFile] = field(factory=read_page_files)

    @classmethod
    def of(
        cls, title: str, rows: Iterable[Mapping[str, Any]], token_bytes: Callable[[int], bytes]
    ) -> "Bundle":
        sessions: dict[str, Mapping[str, Any]] = {}
        for number, row in enumerate(rows, 1):
            for name in ("session_id", "task_id"):
                if not isinstance(row.get(name), str) or _NAME.fullmatch(row[name]) is None:
                    raise Refused(f"trajectory {number} has no {name} that can name a file: leave it out")
            if row["session_id"] in sessions:
                raise Refused(f"session {row['session_id']} is there twice: leave one out")
            sessions[row["session_id"]] = row
        if not sessions:
            raise Refused("there is no trajectory to show: give a trajectories.jsonl with some")
        return cls(title, token_bytes, sessions)

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from ("data/status.json", "data/weights.json", "data/groups.json")
        for session in self._sessions:
            yield f"data/sessions/{session}.json"
            yield f"data/sessions/{session}/forks.json"
            yield f"data/trajectories/{session}.json"
        yield from (f"data/tasks/{task}.json" for task in self._tasks)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> PageFile:
        if name == _INDEX_FILE:
            return _bundle_index(self._files[name])
        if name in self._files:
            return self._files[name]
        body = dump_json(self._answer(name))
        return PageFile(body=body, content_type="application/json", tag=sha256(body).hexdigest()[:32])

    @_tasks.default
    def _by_task(self) -> dict[str, list[Mapping[str, Any]]]:
        found: dict[str, list[Mapping[str, Any]]] = {}
        for row in self._sessions.values():
            found.setdefault(row["task_id"], []).append(row)
        return found

    @_forks.default
    def _by_parent(self) -> dict[str, list[Json]]:
        found: dict[str, list[Json]] = {}
        for row in self._sessions.values():
            if row.get("forked_from"):
                found.setdefault(row["forked_from"]["session_id"], []).append(_record(row))
        return found

    def _answer(self, name: str) -> Json:
        match name.removesuffix(".json").split("/"):
            case ["data", "status"]:
                return {"bundle": self.title, "sessions": len(self._sessions)}
            case ["data", "weights"]:
                return {"history": []}
            case ["data", "groups"]:
                return {"groups": [_group(task, rows) for task, rows in self._tasks.items()]}
            case ["data", "tasks", task] if task in self._tasks:
                return {"task_id": task, "sessions": [_record(row) for row in self._tasks[task]]}
            case ["data", "sessions", session] if session in self._sessions:
                return _session(self._sessions[session])
            case ["data", "sessions", session, "forks"] if session in self._sessions:
                return {"session_id": session, "forks": self._forks.get(session, [])}
            case ["data", "trajectories", session] if session in self._sessions:
                return self._trajectory(self._sessions[session])
        raise KeyError(name)

    def _trajectory(self, row: Mapping[str, Any]) -> Json:
        found = read_trajectory(dict(row))
        pieces = pieces_of([trace.token_ids for trace in found.traces], self.token_bytes)
        return {**trajectory_json(evolve(found, turns=()), arrays="base64"), "pieces": plain(pieces)}


def _bundle_index(index: PageFile) -> PageFile:
    """The page's HTML document for a bundle. Its content security policy is in the document, because a file
    server sends none.
    """
    policy = "; ".join(each for each in POLICY.split("; ") if not each.startswith("frame-ancestors"))
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head = f'<html lang="en" data-bundle>\n<head>\n{meta}'
    body = index.body.replace(b'<html lang="en">\n<head>', head.encode(), 1)
    return evolve(index, body=body, tag="bundle")


def _record(row: Mapping[str, Any]) -> dict[str, Json]:
    """A session's record, as a node lists it."""
    metrics = row.get("metrics") or {}
    return {
        "session_id": row["session_id"],
        "task_id": row["task_id"],
        "sample_index": row.get("sample_index", 0),
        "outcome": row.get("outcome"),
        "status": (row.get("outcome") or {}).get("status"),
        "reward": row.get("reward"),
        "turns": len(row.get("turns") or []),
        "sampled_tokens": metrics.get("sampled_tokens"),
        "finished": None,
        "attempt": row.get("attempt", 0),
        "retried_as": row.get("retried_as"),
        "forked_from": row.get("forked_from"),
    }


def _session(row: Mapping[str, Any]) -> Json:
    whole = {name: value for name, value in row.items() if name not in ("traces", "turns")}
    turns = row.get("turns") or []
    return {"session": _record(row), "turns": turns, "trajectory": {**whole, "traces": [], "turns": []}}


def _group(task: str, rows: Sequence[Mapping[str, Any]]) -> Json:
    """The group of a task's sessions, judged by the default settings of tasks: the file does not have the
    task's own.
    """
    found: list[Trajectory] = [
        read_trajectory({**row, "turns": []}) for row in rows if not row.get("retried_as")
    ]
    whole = group_json(
        judged(DEFAULT_GROUP_SPEC, map(facts_of, found), task_id=task, group_id=str(rows[0].get("group_id")))
    )
    forks = {row["session_id"]: row.get("forked_from") for row in rows}
    sessions: Any = whole["sessions"]
    members = sessions
    if any(forks.values()):  # as in a node's answer
        members = [{**each, "forked_from": forks[each["session_id"]]} for each in sessions]
    return {
        **whole,
        "sessions": members,
        "advantages": group_advantages(members),
        "ended": None,
        "submitted": None,
        "harness": found[0].harness if found else "",
        "metadata": {**found[0].metadata} if found else {},
    }
