"""Measure what scoring costs the agents of a node.

    python benchmarks/scoring.py [URL] [ENGINE]     (default http://127.0.0.1:8080 and policy)

One agent calls a running node, alone and while three clients send `POST /v1/score` with rows of 2,000 tokens.
Prints the median call of each, their ratio, and rows a second. Compare the ratios of one run.
"""

import json
import statistics
import sys
import threading
import time
import urllib.request

from polarnode.client import PolarnodeClient, ScoreRow
from polarnode.core.arrays import ids

CALLS, ROUNDS, CLIENTS, ROWS = 12, 3, 3, 8
LENGTH = 2000


def call(url: str, key: str, text: str) -> float:
    """Seconds of one call of 32 tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 32}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    began = time.monotonic()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers), timeout=300
    ) as answer:
        answer.read()
    return time.monotonic() - began


def agent(client: PolarnodeClient) -> float:
    with client.capture() as session:
        url, key = session.openai_base_url, session.key
        return statistics.median(call(url, key, f"{turn} kiwi " * 60) for turn in range(CALLS))


def load(client: PolarnodeClient, engine: str, over: threading.Event, scored: list[int]) -> None:
    """Send rows until told to stop; `scored` gets their number."""
    while not over.is_set():
        first = len(scored) * ROWS
        rows = [
            ScoreRow(token_ids=ids((7 * place + row) % 1000 + 5 for place in range(LENGTH)))
            for row in range(first, first + ROWS)
        ]
        client.score(rows, engine=engine)
        scored.append(ROWS)


def main() -> None:
    given = dict(enumerate(sys.argv))
    client, engine = PolarnodeClient(given.get(1, "http://127.0.0.1:8080")), given.get(2, "policy")
    for _ in range(ROUNDS):
        alone, over, scored = agent(client), threading.Event(), list[int]()
        clients = [threading.Thread(target=load, args=(client, engine, over, scored)) for _ in range(CLIENTS)]
        began = time.monotonic()
        for each in clients:
            each.start()
        time.sleep(1)
        beside = agent(client)
        rate = sum(scored) / (time.monotonic() - began)
        over.set()
        for each in clients:
            each.join()
        print(f"alone {alone:.3f} s, beside {beside:.3f} s, ratio {beside / alone:.2f}, {rate:.1f} rows/s")


if __name__ == "__main__":
    main()
