"""Whether `pip install polarnode` fits beside each trainer: `make resolution` writes the table of
docs/trainers/environment.md.

For each trainer of tools/resolution.toml its own environment is resolved first, for Linux on amd64, then the same with
what polarnode asks for, keeping every version that may be kept, as pip does in an existing environment. Nothing is
installed but uv, which resolves, in .venv/resolution. Exit code 1 where a trainer cannot be resolved with polarnode.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from page import ROOT, write_part

UV = "uv==0.13.9"
PLATFORM = "x86_64-manylinux_2_39"  # Ubuntu 24.04, the newest that a trainer's image has
PAGE = ROOT / "docs" / "trainers" / "environment.md"
SHOWN = ("numpy", "attrs", "anyio", "orjson", "msgpack")
# what a trainer chooses for itself: never raised, lowered or added by polarnode
LEFT_ALONE = (
    "torch",
    "transformers",
    "tokenizers",
    "vllm",
    "sglang",
    "ray",
    "numpy",
    "pydantic",
    "httpx",
    "openai",
)


class Unresolved(Exception):
    """No set of versions holds these requirements; uv's reason."""


def main(only: Sequence[str]) -> int:
    trainers: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tools" / "resolution.toml").read_text())
    ours: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    uv, failed, rows = installed_uv(), 0, list[str]()
    for name, trainer in trainers.items():
        if only and name not in only:
            continue
        for python in trainer["python"]:
            try:
                row = line_of(name, trainer, python, ours, uv)
            except Unresolved as reason:
                row, failed = f"| {name} | {python} | **cannot be resolved**: {reason} | | |", failed + 1
            print(row, flush=True)
            rows.append(row)
    if not only:
        head = f"{date.today():%d %b %Y}, uv {UV[4:]}, Linux on amd64.\n\n| trainer | Python | it has | polarnode adds | changes |\n|---|---|---|---|---|\n"
        write_part(PAGE, "resolution", head + "\n".join(rows) + "\n")
    return int(failed > 0)


def line_of(name: str, trainer: Mapping[str, Any], python: str, ours: Sequence[str], uv: Path) -> str:
    """The trainer's row. Unresolved, also where polarnode would change what a trainer chooses for itself."""
    locked: Mapping[str, str] = trainer.get("locked", {})
    requires: Sequence[str] = trainer.get("requires", ())
    alone = dict(locked) if locked else resolved(requires, {}, python, uv)
    both = resolved([*requires, *ours], alone, python, uv)
    changed = {
        each: (alone[each], both[each]) for each in alone if each in both and both[each] != alone[each]
    }
    touched = [
        each
        for each in LEFT_ALONE
        if each in changed or (each in both and each not in alone and each != "numpy")
    ]
    if touched:
        raise Unresolved(f"it would change {', '.join(touched)}")
    what = f"`{requires[0]}`" if len(requires) == 1 else trainer["source"]
    has = ", ".join(f"{each} {alone[each]}" for each in SHOWN if each in alone)
    adds = ", ".join(sorted(both.keys() - alone.keys()))
    moves = ", ".join(f"{each} {old} → {new}" for each, (old, new) in changed.items()) or "nothing"
    return f"| {name}<br>{what} | {python} | {has} | {adds} | {moves} |"


def resolved(requires: Sequence[str], kept: Mapping[str, str], python: str, uv: Path) -> dict[str, str]:
    """Versions that hold `requires`; those of `kept` where they may stay. Unresolved with uv's reason."""
    with TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.in"), Path(folder, "answer.txt")
        asked.write_text("\n".join(requires) + "\n")
        answer.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
        command = [uv, "pip", "compile", asked, "-o", answer, "--quiet", "--no-header", "--no-annotate"]
        command += [
            "--python-version",
            python,
            "--python-platform",
            PLATFORM,
            "--prerelease",
            "if-necessary-or-explicit",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Unresolved(" ".join(re.sub(r"[╰─▶│|]", " ", done.stderr).split())[:300])
        return dict(pins(answer.read_text()))


def pins(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, found, version = line.partition("==")
        if found:
            yield name.partition("[")[0], version.partition(";")[0].strip()


def installed_uv() -> Path:
    """uv, in an environment of its own."""
    folder = Path(sys.prefix) / "resolution"
    if not (folder / UV).exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", UV],
            check=True,
        )
        (folder / UV).touch()
    return folder / "bin" / "uv"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
