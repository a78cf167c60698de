"""A harness for tests, run inside a container with nothing but Python's standard library: talks to its door
and retries as the SDKs do.

Its one argument is JSON; see DEFAULTS. It says on stdout what it did, a line a fact, each line flushed,
because it may be killed at any time.
"""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

DEFAULTS = {
    "turns": 3,  # None: until a call is refused
    "stream": True,
    "api": "openai",  # or "anthropic"
    "max_tokens": 16,
    "reply": None,  # to every answer; None: another each turn
    "exit": 0,
    "sleep": 0,  # seconds after the last turn
    # a number: two `sleep NUMBER` are left behind, one in a session of its own and deaf to TERM
    "background": None,
    "say": None,  # printed first: found in this process's command line and log
}
PAUSE_S = 0.3  # between attempts: short, so that tests see retries at once


class Refused(Exception):
    """The door said that trying again is useless."""


def main() -> int:
    given = {**DEFAULTS, **json.loads(sys.argv[1])}
    tell(f"begin {given['say']}")
    call = {"openai": openai, "anthropic": anthropic}[given["api"]]
    messages = [{"role": "user", "content": os.environ.get("POLARNODE_INSTRUCTION", "Hello.")}]
    turn = 0
    try:
        while given["turns"] is None or turn < given["turns"]:
            text = patiently(call, messages, given)
            tell(f"turn {turn} {len(text)} characters")
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": given["reply"] or f"Go on, step {turn}."},
            ]
            turn += 1
    except Refused as refused:
        tell(f"refused {refused}")
    with open("turns.txt", "w") as file:
        file.write(str(turn))
    if given["background"]:
        leave_behind(str(given["background"]))
    time.sleep(given["sleep"])
    tell("end")
    return int(given["exit"])


def tell(line: str) -> None:
    print(line, flush=True)


def leave_behind(number: str) -> None:
    subprocess.Popen(["sleep", number])
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
        f" time.sleep({number})"
    )
    child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    tell("left behind")


def patiently(call, messages, given) -> str:
    while True:
        asked = time.monotonic()
        try:
            return call(messages, given)
        except urllib.error.HTTPError as error:
            body = error.read().decode("utf-8", "replace")
            if error.code != 429 and error.code < 500:
                raise Refused(f"{error.code} {body}") from error
            tell(f"retry {error.code} after {time.monotonic() - asked:.2f} s")
        except (OSError, http.client.HTTPException) as error:
            tell(f"retry {type(error).__name__} after {time.monotonic() - asked:.2f} s")
        time.sleep(PAUSE_S)


def post(url, headers, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    return urllib.request.urlopen(request, timeout=600)


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
        if event.get("type") == "message_stop":
            return
    raise ConnectionError("the stream has no end")


def openai(messages, given) -> str:
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": messages,
        "max_tokens": given["max_tokens"],
        "stream": given["stream"],
    }
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", headers, body) as response:
        if not given["stream"]:
            return json.load(response)["choices"][0]["message"]["content"] or ""
        return "".join(
            choice["delta"].get("content") or "" for event in events(response) for choice in event["choices"]
        )


def anthropic(messages, given) -> str:
    body = {
        "model": os.environ["ANTHROPIC_MODEL"],
        "messages": messages,
        "max_tokens": given["max_tokens"],
        "stream": given["stream"],
    }
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    with post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", headers, body) as response:
        if not given["stream"]:
            return "".join(block.get("text", "") for block in json.load(response)["content"])
        return "".join(
            event["delta"].get("text", "")
            for event in events(response)
            if event["type"] == "content_block_delta"
        )


if __name__ == "__main__":
    sys.exit(main())
