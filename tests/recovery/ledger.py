"""A harness for tests of recovery, run inside a container with nothing but Python's standard library.

Its one argument is JSON; see DEFAULTS. Each answer it was given is a line of `ledger.jsonl` in its workdir
and of its output before it asks for the next, so that whoever looks, after whatever end, knows what it was
told. It asks again as SDKs do, and gives up after `patience` seconds.
"""

import http.client
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
import uuid

DEFAULTS = {
    "turns": 3,  # None: until a call is refused
    "stream": True,
    "patience": 120.0,  # seconds without an answer
    "old_keys": [],  # asked with first: their statuses are told
    "pause": 0.0,  # seconds between calls
    "until": None,  # a file: where it is, no further turn is asked for
    "end": None,  # an exit code, or the name of a signal it sends itself at its end
    "begin": None,  # the end of its first words; None for some of its own
    "mark": "",  # found in this process's command line
}


def main() -> int:
    given = {**DEFAULTS, **json.loads(sys.argv[1])}
    tell(key=os.environ["OPENAI_API_KEY"], old=[status_of(key) for key in given["old_keys"]])
    messages = [{"role": "user", "content": f"Begin {given['begin'] or uuid.uuid4().hex}."}]
    turn = 0
    while given["turns"] is None or turn < given["turns"]:
        text = patiently(messages, given)
        if text is None:
            return 3
        tell(text=text)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Go on, step {turn}."},
        ]
        turn += 1
        if given["until"] and os.path.exists(given["until"]):
            break
        time.sleep(given["pause"])
    if isinstance(given["end"], str):
        os.kill(os.getpid(), getattr(signal, given["end"]))
    return given["end"] or 0


def tell(**fact) -> None:
    line = json.dumps(fact) + "\n"
    with open("ledger.jsonl", "a") as file:
        file.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()


def status_of(key: str) -> int:
    try:
        with post([{"role": "user", "content": "Hello."}], stream=False, key=key) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def patiently(messages, given):
    """An answer's text; None when the session is over or nobody answers."""
    asked = time.monotonic()
    while True:
        try:
            return answer(messages, given["stream"])
        except urllib.error.HTTPError as error:
            if error.code != 429 and error.code < 500:
                return None
        except (OSError, http.client.HTTPException):
            pass
        if time.monotonic() - asked >= given["patience"]:
            return None
        time.sleep(0.2)


def answer(messages, stream):
    with post(messages, stream=stream, key=os.environ["OPENAI_API_KEY"]) as response:
        if not stream:
            return json.load(response)["choices"][0]["message"]["content"] or ""
        return "".join(
            choice["delta"].get("content") or "" for event in events(response) for choice in event["choices"]
        )


def post(messages, *, stream, key):
    body = json.dumps({"model": "any", "messages": messages, "stream": stream}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urllib.request.urlopen(
        urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers),
        timeout=600,
    )


def events(response):
    """The JSON of each server-sent event; a stream that breaks off or tells of an error is a
    ConnectionError.
    """
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise ConnectionError(event["error"])
        yield event
    raise ConnectionError("the stream has no end")


if __name__ == "__main__":
    sys.exit(main())
