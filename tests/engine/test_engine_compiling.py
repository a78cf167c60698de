"""Constraints are compiled and tried in processes that can be ended, and sessions take turns with them. What
costs too much is refused, and nobody waits for it.

The program imports torch, for some seconds: the tests of it share one.
"""

import fcntl
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import xgrammar

from polarnode.engine.embedded import compiling, grammar_process
from polarnode.engine.embedded.compiling import SHARE, FairThreads, ForkedCompiler, NotStarted, TooCostly

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
INFO = xgrammar.TokenizerInfo([bytes([each]) for each in range(256)], stop_token_ids=[0])
FOREVER = "a*" * 3000
AMBIGUOUS = {
    "root": 'root ::= root root root | "a" | ""',
    "class": 'root ::= s "\\x01"\ns ::= s s s | [ -~] | ""',
    "forty": 'root ::= t "\\x01"\n'
    + "\n".join(f"s{i} ::= t s{(i + 1) % 40} | s{(i + 1) % 40} t | [ -~]" for i in range(40))
    + "\nt ::= "
    + " | ".join(f"s{i}" for i in range(40)),
}
PLAIN = {
    "list": 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ | "{" item "}"',
    "expression": 'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9]+',
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ForkedCompiler]:
    found = ForkedCompiler(INFO, lambda: False)
    yield found
    found.close()


def test_compiled_grammar_is_returned(compiler: ForkedCompiler) -> None:
    for grammar, text in (
        (compiler.compile_regex("[0-9]{2}"), "42"),
        (compiler.compile_grammar('root ::= "yes" | "no"'), "no"),
        (compiler.compile_json_schema('{"type":"integer"}', any_whitespace=True), "17"),
        (compiler.compile_builtin_json_grammar(), '{"a": [1]}'),
    ):
        assert xgrammar.GrammarMatcher(grammar).accept_string(text)
    with pytest.raises(RuntimeError, match="parenthesis is not closed"):
        compiler.compile_regex("((")


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_grammars_cost_too_much(compiler: ForkedCompiler, name: str) -> None:
    with pytest.raises(TooCostly):
        compiler.compile_grammar(AMBIGUOUS[name])


@pytest.mark.parametrize("name", PLAIN)
def test_plain_grammars_are_accepted(compiler: ForkedCompiler, name: str) -> None:
    assert compiler.compile_grammar(PLAIN[name])


def test_killed_compiler_process_restarts(compiler: ForkedCompiler) -> None:
    compiler.compile_regex("a")
    assert compiler._program is not None
    compiler._program.kill()
    compiler._program.wait()
    assert compiler.compile_regex("b")


def test_endless_constraints_block_no_session(
    compiler: ForkedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions fill all threads with constraints that would be compiled for hours."""
    monkeypatch.setattr(compiling, "HURRIED_S", 0.5)
    threads = FairThreads()
    monkeypatch.setattr(compiler, "hurried", threads.others_wait)
    endless: list[Future[Any]] = []
    for session in ("one", "two"):
        threads.asking = session
        endless += [threads.submit(compiler.compile_regex, f"{FOREVER}{number}") for number in range(4)]
    threads.asking = "sibling"
    for number in range(3):
        assert threads.submit(compiler.compile_regex, f"b{number}").result(120)
    assert sum(map(cut_off, endless)) >= 1, "one of the threads was freed"
    assert not any(each.done() for each in endless)
    for each in endless:
        each.cancel()


def cut_off(future: "Future[Any]") -> bool:
    return isinstance(getattr(future, "ended_by", None), TooCostly)


def test_crashed_fork_is_no_answer(compiler: ForkedCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = ForkedCompiler._wait

    def ended(self: ForkedCompiler, job: Any, fork: int) -> None:
        signal.pidfd_send_signal(fork, signal.SIGSEGV)  # as by a fault of xgrammar's
        wait(self, job, fork)

    monkeypatch.setattr(ForkedCompiler, "_wait", ended)
    with pytest.raises(TooCostly):
        compiler.compile_regex(FOREVER)
    monkeypatch.undo()
    assert compiler.compile_regex("a")


def test_answer_on_high_descriptor_is_seen() -> None:
    """As in an engine of many GPUs, whose process holds more than a thousand."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.prlimit(0, resource.RLIMIT_NOFILE, (min(most, 4096), most))
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1024)) as job:
            theirs.send(b"g")
            ForkedCompiler(INFO, lambda: False)._wait(job, -1)
            assert job.recv(1) == b"g"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_failed_compiler_start_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler process that does not start is no fault of the constraint."""
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    compiler, future = ForkedCompiler(INFO, lambda: False), Future[Any]()
    compiling._settle(future, lambda: compiler.compile_regex("a"))
    assert isinstance(getattr(future, "ended_by", None), NotStarted)
    assert not future.done()
    compiler.close()


# ── turns ─────────────────────────────────────────────────────────────────────


def test_session_uses_only_its_threads() -> None:
    """A session uses its share of the threads, and leaves the others to other sessions."""
    threads, going, began = FairThreads(), threading.Event(), threading.Semaphore(0)

    def hold() -> str:
        began.release()
        assert going.wait(60)
        return "held"

    threads.asking = "many"
    held = [threads.submit(hold) for _ in range(10)]
    for _ in range(SHARE):
        assert began.acquire(timeout=60)
    assert not threads.others_wait(), "its own constraints are no reason to hurry"
    threads.asking = "other"
    assert threads.submit(lambda: "now").result(60) == "now"
    assert not began.acquire(blocking=False)
    going.set()
    assert [each.result(60) for each in held] == ["held"] * 10


def test_failed_call_affects_no_other() -> None:
    threads = FairThreads()

    def fails() -> None:
        raise RuntimeError("no grammar")

    call: Callable[[], Any] = fails
    assert isinstance(threads.submit(call).exception(60), RuntimeError)
    cancelled = threads.submit(lambda: 1)
    cancelled.cancel()
    assert threads.submit(lambda: 2).result(60) == 2


def test_finite_regex_steps_are_cheap() -> None:
    compiler = grammar_process.StrictStringCompiler(INFO, cache_enabled=False)
    assert not grammar_process.is_costly(compiler.compile_regex("a"), INFO, 0)
    assert not grammar_process.is_costly(compiler.compile_regex("a*b"), INFO, 0)
