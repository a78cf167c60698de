"""What a hostile harness would try from inside its container, with nothing but Python's standard library.
What it found is a JSON file.

Its one argument is JSON: `ports` and `addresses` of the machine outside, `other_key` of another live session,
`token` of the control plane, `mark` a variable of the node's own.
"""

import json
import os
import socket
import sys
import urllib.error
import urllib.request

CALL = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
RESPONSES = {"model": "m", "input": "hello", "max_output_tokens": 4}
GENERATE, CONTENTS = "/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hello"}]}]}
WAIT_S = 3.0  # for a connection that is neither refused nor made


def main() -> None:
    given = json.loads(sys.argv[1])
    own = os.environ["OPENAI_API_KEY"]
    addresses = ["127.0.0.1", *given["addresses"]]
    report = {
        "reward": 1,
        "connected": [
            f"{host}:{port}" for host in addresses for port in given["ports"] if connects(host, port)
        ],
        "listening": listening(),
        "routes": table("/proc/net/route"),
        "unix": [line.split()[-1] for line in table("/proc/net/unix") if "@" in line or "/" in line],
        "resolved": resolves("example.com"),
        "datagram": sends("169.254.169.254"),
        "own_key": status("/v1/chat/completions", own, CALL),
        "other_key": status("/v1/chat/completions", given["other_key"], CALL),
        "other_key_anthropic": status("/v1/messages", given["other_key"], CALL, header="x-api-key"),
        "other_key_responses": status("/v1/responses", given["other_key"], RESPONSES),
        "other_key_google": status(GENERATE, given["other_key"], CONTENTS, header="x-goog-api-key"),
        "other_key_in_query": status(f"{GENERATE}?key={given['other_key']}", None, CONTENTS),
        "other_key_in_path": status(f"/sessions/{given['other_key']}/v1/chat/completions", None, CALL),
        "no_key": status("/v1/chat/completions", None, CALL),
        "control": {path: status(path, given["token"]) for path in CONTROL},
        "submitted": status(
            "/v1/tasks",
            given["token"],
            {"instruction": "x", "harness": {"name": "shell", "command": ["true"]}},
        ),
        "environment": sorted(os.environ),
        "leaked": [
            where for where in environments() if given["mark"] in where[1] or given["token"] in where[1]
        ],
        "processes": commands(),
        "capabilities": [
            line.split()[1]
            for line in table("/proc/self/status")
            if line.startswith(("CapEff", "CapPrm", "CapBnd", "NoNewPrivs"))
        ],
    }
    with open("/work/report.json", "w") as file:
        json.dump(report, file)


CONTROL = (
    "/v1/tasks",
    "/v1/status",
    "/v1/trajectories/stream",
    "/v1/export",
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/weights",
)


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=WAIT_S).close()
    except OSError:
        return False
    return True


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, 80))
    except OSError:
        return False


def sends(host: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            return sender.sendto(b"hello", (host, 80)) > 0
        except OSError:
            return False


def listening() -> list[str]:
    """Addresses as the kernel writes them, of sockets that listen in this network namespace."""
    return [
        line.split()[1]
        for line in [*table("/proc/net/tcp"), *table("/proc/net/tcp6")]
        if line.split()[3] == "0A"
    ]


def table(path: str) -> list[str]:
    """The lines of a kernel table, without its head where it has one."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        lines = file.read().splitlines()
    return lines[1:] if path.startswith("/proc/net") else lines


def status(
    path: str, key: "str | None", body: "object | None" = None, *, header: str = "Authorization"
) -> int:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers[header] = f"Bearer {key}" if header == "Authorization" else key
    request = urllib.request.Request(
        "http://127.0.0.1:8080" + path, None if body is None else json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def environments() -> "list[tuple[str, str]]":
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", errors="replace") as file:
                found.append((pid, file.read()))
        except OSError:
            continue
    return found


def commands() -> "list[str]":
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", errors="replace") as file:
                found.append(file.read().replace("\0", " ")[:80])
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
