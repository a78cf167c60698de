"""Every rule of the token contract broken once, on purpose, and the tests that must see it: `python
tests/kits/mutants.py [NAME ...]`.

A mutant is some text of the program and what stands there instead. The tests are collected once; each mutant
is then a fork of that process in which the code of the functions that differ is exchanged, and its tests are
run. So it costs what its tests cost, and nothing is written to disk. Whoever moves a rule moves its mutant
with it: one whose old text is gone is an error, not a pass.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from attrs import define, field, frozen

ROOT = Path(__file__).parents[2]
MAX_WORKERS = 2
HANG_LIMIT_S = 240  # a mutant whose tests never end is seen too; the tests of the longest take some seconds

CONTRACT = "tests/properties/test_tokens_contract.py"
CASES = "tests/properties/test_tokens_cases.py"
SESSIONS = "tests/properties/test_tokens_sessions.py"


@frozen(kw_only=True)
class Mutant:
    """`old` stands in `module` exactly once, inside a function; with `new` in its place one of `tests` must
    fail.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> Path:
        path = ROOT / (self.module.replace(".", "/") + ".py")
        return path if path.is_file() else ROOT / self.module.replace(".", "/") / "__init__.py"

    def changed(self) -> str:
        """The module's text with the rule broken."""
        source = self.file.read_text()
        if source.count(self.old) != 1:
            raise LookupError(
                f"rule moved: {self.module} holds {self.old!r} {source.count(self.old)} times; update the"
                f" mutant {self.name!r}"
            )
        return source.replace(self.old, self.new)

    def apply(self) -> int:
        """Break the rule in this process, for good. How many functions changed."""
        before, after = (
            _functions(compile(text, str(self.file), "exec"))
            for text in (self.file.read_text(), self.changed())
        )
        differ = [
            name for name, code in after.items() if _code_meaning(code) != _code_meaning(before.get(name))
        ]
        module = importlib.import_module(self.module)
        for name in differ:
            _live(module, name).__code__ = after[name]
        if not differ:
            raise LookupError(f"the mutant {self.name!r} changes no function of {self.module}")
        return len(differ)


def _functions(code: CodeType, path: str = "") -> dict[str, CodeType]:
    """The functions of a module and the methods of its classes, by their names; what is inside a function is
    a part of it.
    """
    found: dict[str, CodeType] = {}
    for inner in (each for each in code.co_consts if isinstance(each, CodeType)):
        is_class = "__qualname__" in inner.co_names and not inner.co_varnames
        name = f"{path}{inner.co_name}"
        found |= (
            _functions(inner, f"{name}.")
            if is_class
            else {name: inner}
            if inner.co_name.isidentifier()
            else {}
        )
    return found


def _code_meaning(code: CodeType | None) -> Any:
    """What a code does, without where it stands."""
    if code is None:
        return None
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        tuple(_code_meaning(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts),
    )


def _live(module: Any, name: str) -> FunctionType:
    """The function of that name as the program holds it."""
    holder, _, last = name.rpartition(".")
    place = getattr(module, holder) if holder else module
    found = vars(place)[last]
    for wrapped in ("fget", "__func__", "__wrapped__"):
        found = getattr(found, wrapped, found)
    if not isinstance(found, FunctionType):
        raise LookupError(f"{module.__name__}.{name} is no function any more")
    return found


@frozen(kw_only=True)
class Outcome:
    """How the tests of a mutant ended: 1, one failed; 0, all passed; 71, the mutant is no mutant; negative, a
    signal.
    """

    name: str
    code: int
    seconds: float
    said: str

    @property
    def killed(self) -> bool:
        return self.code in (1, -signal.SIGALRM)


@define(eq=False)
class MutantRunner:
    """A pytest plugin that, in place of running what was collected, runs it for each mutant in a fork."""

    mutants: Sequence[Mutant]
    failures: list[str] = field(factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} test files can not be read")
        for outcome in self.outcomes(session):
            told = {
                "name": outcome.name,
                "code": outcome.code,
                "seconds": outcome.seconds,
                "killed": outcome.killed,
                "said": outcome.said,
            }
            print("\n" + json.dumps(told), flush=True)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}\n{report.longreprtext}")

    def outcomes(self, session: pytest.Session) -> Iterator[Outcome]:
        """WORKERS at a time; told as they end."""
        waiting, running = list(reversed(self.mutants)), dict[int, tuple[Mutant, float, Path]]()
        with tempfile.TemporaryDirectory() as scratch:
            while waiting or running:
                while waiting and len(running) < MAX_WORKERS:
                    mutant = waiting.pop()
                    output = Path(scratch) / f"{len(waiting)}.txt"
                    running[self.forked(session, mutant, output)] = (mutant, time.monotonic(), output)
                pid, status = os.wait()
                mutant, began, output = running.pop(pid)
                seconds = round(time.monotonic() - began, 1)
                said = output.read_text() if output.is_file() else ""
                yield Outcome(
                    name=mutant.name,
                    code=os.waitstatus_to_exitcode(status),
                    seconds=seconds,
                    said=said[-3000:],
                )

    def forked(self, session: pytest.Session, mutant: Mutant, output: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            signal.alarm(HANG_LIMIT_S)
            code = self.tested(session, mutant, output)
        finally:
            os._exit(code)  # nothing of the parent's is to be ended here

    def tested(self, session: pytest.Session, mutant: Mutant, output: Path) -> int:
        items = [
            item
            for test in mutant.tests
            for item in session.items
            if item.nodeid == test or item.nodeid.startswith((f"{test}::", f"{test}["))
        ]
        try:
            if not items:
                raise LookupError(
                    f"the tests of the mutant {mutant.name!r} are gone: {', '.join(mutant.tests)}"
                )
            mutant.apply()
        except LookupError as error:
            output.write_text(str(error))
            return 71
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failures:
                output.write_text(self.failures[0])
                return 1
        return 0


def main() -> int:
    os.environ["POLARNODE_MUTANT"] = "1"  # `sample_kit.examples` then looks at fewer, and does not shrink
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    from mutant_rules import MUTANTS

    wanted = set(sys.argv[1:])
    mutants = [mutant for mutant in MUTANTS if not wanted or mutant.name in wanted]
    files = dict.fromkeys(test.partition("::")[0] for mutant in mutants for test in mutant.tests)
    return int(
        pytest.main(
            [
                "-q",
                "-s",
                "--no-header",
                "--tb=short",
                "--assert=plain",
                "-p",
                "no:cacheprovider",
                "--rootdir",
                str(ROOT),
                *files,
            ],
            plugins=[MutantRunner(mutants)],
        )
    )


if __name__ == "__main__":
    sys.exit(main())
