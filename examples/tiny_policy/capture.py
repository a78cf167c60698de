"""Record what the real harnesses send: their prompts, their tools, and their format of tool results.

    python -m examples.tiny_policy.capture --pi PATH/pi --mini PATH/mini

The requests are third-party prose, so they are kept in an ignored cache and recorded again on each machine
that trains.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from examples.tiny_policy.endpoint import Answer, Call, Json, endpoint
from examples.tiny_policy.harness import find, run

CACHE = Path(__file__).parent / ".cache"
PROMPT = "PROMPT-GOES-HERE"


def _call(name: str, **arguments: object) -> Answer:
    return Answer("I look.", (Call(name, json.dumps(arguments)),))


def pi_script() -> Iterator[Answer]:
    """Every tool of pi, once well and once badly, then an end."""
    yield _call("read", path="/work/a.txt")
    yield _call("read", path="/work/missing.txt")
    yield _call("bash", command="cat a.txt; echo oops >&2; false")
    yield _call("bash", command="true")
    yield _call("write", path="out.txt", content="kiwi\n")
    yield _call("edit", path="out.txt", edits=[{"oldText": "kiwi", "newText": "fig"}])
    yield _call("write", path="out.txt")
    yield _call("nosuchtool", path="out.txt")
    yield Answer("Done.")


def mini_script() -> Iterator[Answer]:
    """A good command, a failing one, a silent one, a reply without a call, and the end."""
    yield _call("bash", command="cat a.txt")
    yield _call("bash", command="cat missing.txt; nosuchcommand")
    yield _call("bash", command="true")
    yield Answer("I forgot to call a tool.")
    yield Answer("Bad.", (Call("bash", '{"command": '),))
    yield _call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


SCRIPTS = {"pi": pi_script, "mini": mini_script}


def record(name: str, program: str) -> list[Json]:
    """The requests of one demonstration run of harness `name`."""
    script = SCRIPTS[name]()
    with tempfile.TemporaryDirectory() as root, endpoint(lambda _: next(script)) as (url, requests):
        folder = Path(root, "work")
        folder.mkdir()
        (folder / "a.txt").write_text("color=blue\nshape=round\n")
        done = run(name, program, PROMPT, folder, Path(root, "home"), url)
        if not requests:
            raise SystemExit(f"{name} made no request (exit {done.code}):\n{done.output}")
        return list(requests)


def capture(name: str, program: str | None = None) -> Path:
    """Record harness `name` into the cache and return the file."""
    requests = record(name, find(name, program))
    CACHE.mkdir(exist_ok=True)
    target = CACHE / f"{name}.json"
    target.write_text(json.dumps(requests, indent=1))
    return target


def captured(name: str) -> list[Json]:
    """The recorded requests of harness `name`, recorded now if they are not in the cache."""
    target = CACHE / f"{name}.json"
    source = target if target.exists() else capture(name)
    requests: list[Json] = json.loads(source.read_text())
    return requests


def main() -> None:
    """Record both harnesses again."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in SCRIPTS:
        parser.add_argument(f"--{name}", help=f"path of the {name} executable")
    given = vars(parser.parse_args())
    for name in SCRIPTS:
        print(name, capture(name, given[name]))


if __name__ == "__main__":
    main()
