"""A node for the page: the real control plane, journal, scheduler and tokenizer on containers and engines in memory,
with the sessions of `page_samples`, and two that run until it ends.

    python tests/kits/page_node.py --folder FOLDER [--port 0] [--token TOKEN] [--long 100000] [--actions]

Prints a line of JSON, {"url"}, when it serves, and ends with its standard input.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import trio
from hollow_node import open_hollow
from page_samples import HOSTILE, write_group, write_long, write_tree

from polarnode.core.task import BuilderSpec, HarnessSpec, TaskSpec
from polarnode.node.config import NodeConfig


async def main(folder: Path, port: int, token: str | None, long: int, actions: bool) -> None:
    config = NodeConfig(
        engine="simulated",
        port=port,
        token=token,
        node_id="page",
        state_dir=str(folder / "state"),
        podman_dir=str(folder / "podman"),
        memory_reserve_mb=1,
        disk_reserve_mb=1,
        ui_actions=actions,
    )
    async with open_hollow(config) as (node, address):
        journal, tokenizer = node.journal, node.model.tokenizer
        write_group(journal, tokenizer, "parser", (1.0, 0.0, 0.5, None), {"split": "train", "level": 3})
        write_group(journal, tokenizer, "uniform", (1.0, 1.0), {"split": "train", "level": 1})
        write_group(
            journal,
            tokenizer,
            "sliced",
            (0.25, 0.75),
            {"split": "test", "level": 2},
            BuilderSpec(config={"max_row_tokens": 256}),
        )
        write_tree(journal, tokenizer, "tree")
        if long:
            write_long(journal, tokenizer, "long", long)
        await journal.writer.flush()
        logs = folder / "state" / "sessions"
        logs.mkdir(exist_ok=True)
        (logs / "parser-3.log").write_text(f"\x1b[1mstarting\x1b[0m\n 10%\r100%\nKeyError: 'x'\n{HOSTILE}\n")
        (folder / "state" / "node.log").write_text("".join(f"line {at} of the node\n" for at in range(900)))
        (folder / "state" / "engine-0.log").write_text(f"\x1b[31mready\x1b[0m\n{HOSTILE}\n")
        live = TaskSpec(
            task_id="live",
            instruction="x",
            harness=HarnessSpec(command=("hollow", "3600", "1")),
            num_samples=2,
        )
        await node.submit(live, idempotency_key=None)
        print(json.dumps({"url": f"http://{address.host}:{address.port}"}), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        os._exit(0)  # the live sessions would be waited for


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--token")
    options.add_argument("--long", type=int, default=0)
    options.add_argument("--actions", action="store_true")
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, filename=given.folder / "node.log")
    trio.run(main, given.folder, given.port, given.token, given.long, given.actions)
