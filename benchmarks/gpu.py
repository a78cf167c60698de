"""What one GPU shows, in parts of eight minutes at most, in order of worth.

    python benchmarks/gpu.py --out out/gpu [--parts smoke,start] [--model FOLDER] [--again] [--dry-run]

Each part is a process of its own, and what it found stands in OUT/NAME.json: a run that was cut off goes on
with the next part. A part that failed says why, and the next one begins. `--dry-run` plays all of them on
the CPU with small sizes, so that the program cannot rot where no GPU is; a part that only a GPU can show
refuses there with its reason. At the end a table for docs/measurements.md is printed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import trio

sys.path.insert(0, str(Path(__file__).parent))
from gpu_parts import PARTS, Bench, NeedsGpu

PART_S: Final = 480.0  # a machine is lent for ten minutes a command, and its transfers take some of them


def versions() -> dict[str, str]:
    """Of what the figures depend on; a figure without them means nothing."""
    found = {}
    for name in ("torch", "sglang", "transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["gpu"] = "none"
    return found


def play(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part, in this process."""
    bench = Bench(folder=options.out / name, model=options.model, dry=options.dry_run)
    bench.folder.mkdir(parents=True, exist_ok=True)
    try:
        figures = trio.run(PARTS[name], bench)
    except NeedsGpu as reason:
        return {"part": name, "refused": str(reason)}
    return {"part": name, "versions": versions(), "dry_run": options.dry_run, "figures": figures}


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part, in a process that ends after PART_S; what it found, or why it found nothing."""
    command = [sys.executable, __file__, "--out", str(options.out), "--play", name]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--model", str(options.model)] if options.model else []
    log = options.out / f"{name}.log"
    with log.open("wb") as stream:
        try:
            done = subprocess.run(command, stdout=stream, stderr=stream, timeout=PART_S)
        except subprocess.TimeoutExpired:
            return {"part": name, "failed": f"it took more than {PART_S:.0f} s; see {log.name}"}
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return {"part": name, "failed": f"exit status {done.returncode}: {''.join(last)} (see {log.name})"}
    found: dict[str, Any] = json.loads((options.out / f"{name}.json").read_text())
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Rows for docs/measurements.md."""
    rows = ["| part | figure | value |", "|---|---|---|"]
    for name, each in found.items():
        reason = each.get("failed") or each.get("refused")
        if reason:
            rows.append(f"| {name} | {'failed' if 'failed' in each else 'refused'} | {reason} |")
        rows += [f"| {name} | {figure} | {value} |" for figure, value in each.get("figures", {}).items()]
    return "\n".join(rows)


def main(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    names = list(PARTS) if options.parts is None else options.parts.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        print(f"--parts: {', '.join(unknown)} is no part; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    found = {}
    for name in names:
        file = options.out / f"{name}.json"
        if options.again or not file.exists():
            each = in_a_process(name, options)
            if "failed" not in each:
                file.write_text(json.dumps(each, indent=2) + "\n")
        else:
            each = json.loads(file.read_text())
        found[name] = each
        print(json.dumps(each), flush=True)
    print(table(found))
    return int(any("failed" in each for each in found.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--parts", help="some of them, with commas; all without it")
    parser.add_argument("--model", type=Path, help="a checkpoint for speed; one of random weights without it")
    parser.add_argument("--again", action="store_true", help="play parts that were played")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.play is None:
        sys.exit(main(given))
    (given.out / f"{given.play}.json").write_text(json.dumps(play(given.play, given), indent=2) + "\n")
