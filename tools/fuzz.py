"""`make fuzz`: play the fuzz targets of tests/fuzz for some minutes.

    python tools/fuzz.py [--minutes 30] [--target NAME …] [--coverage]

Every target gets the same share of the minutes. What fails is shrunk, printed with its input and kept in
.hypothesis/fuzz, so that the next run of the target begins with it. `--coverage` lets atheris, where it is installed
(`pip install '.[fuzz]'`), choose the inputs by the branches that they reach; its corpus is in .hypothesis/corpus.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "kits"), str(ROOT / "tests" / "fuzz")]
CORPUS = ROOT / ".hypothesis" / "corpus"
LONGEST_INPUT = 1 << 14  # bytes of a choice sequence of Hypothesis: enough for the largest body here


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--target", action="append", default=[], help="a name, or the beginning of several")
    parser.add_argument("--coverage", action="store_true", help="choose inputs by coverage, with atheris")
    parser.add_argument("--one", nargs=2, metavar=("MODULE", "TARGET"), help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.one:
        return by_coverage(*options.one, rest)
    chosen = {
        name: module
        for name, module in targets().items()
        if not options.target or name.startswith(tuple(options.target))
    }
    if not chosen:
        parser.error(f"no target begins so: there are {', '.join(sorted(targets()))}")
    seconds = 60 * options.minutes / len(chosen)
    played = [play(module, name, seconds, coverage=options.coverage) for name, module in chosen.items()]
    failed = [name for name, code in zip(chosen, played, strict=True) if code]
    print(f"{len(chosen)} targets played, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return bool(failed)


def targets() -> dict[str, str]:
    """The module of each target."""
    return {
        target.name: path.stem
        for path in sorted((ROOT / "tests" / "fuzz").glob("test_fuzz_*.py"))
        for target in importlib.import_module(path.stem).TARGETS
    }


def play(module: str, name: str, seconds: float, *, coverage: bool) -> int:
    """One target in a process of its own: what it leaves in memory is not the next one's."""
    print(f"· {name}: {seconds:.0f} s", flush=True)
    if coverage:
        corpus = CORPUS / name
        corpus.mkdir(parents=True, exist_ok=True)
        limits = [f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST_INPUT}", "-print_final_stats=1"]
        command = [sys.executable, __file__, "--one", module, name, str(corpus), *limits]
        return subprocess.run(command, cwd=CORPUS / name, check=False).returncode
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--no-header"),
        *(f"tests/fuzz/{module}.py", "-k", f"[{name}]"),
    ]
    environment = {**os.environ, "POLARNODE_FUZZ_S": str(seconds)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def by_coverage(module: str, name: str, arguments: list[str]) -> int:
    """The target under atheris. Its bytes are Hypothesis's choices, so a failure is in the database too, and
    a run without `--coverage` shrinks it.
    """
    try:
        import atheris  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: .venv/bin/python -m pip install '.[fuzz]'")
    with atheris.instrument_imports(include=["polarnode"]):
        found: Any = importlib.import_module(module)
    import fuzz_kit

    target = next(each for each in found.TARGETS if each.name == name)
    atheris.Setup(
        [sys.argv[0], *arguments], fuzz_kit.property_of(target, fuzz_kit.LONG).hypothesis.fuzz_one_input
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
