"""Constraints of an engine's scheduler, compiled beside it: by threads that each wait for a fork of
`grammar_process`, fairly among sessions.

No constraint keeps another session's from being compiled: a session has at most SHARE of the threads. If
others wait even so, a fork ends after HURRIED_S instead of COMPILE_TIMEOUT_S.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, Final

import xgrammar
from attrs import define, field

from polarnode.engine.embedded.grammar_process import (
    COMPILE_TIMEOUT_S,
    COSTLY,
    FAULT,
    LOW_PRIORITY_AFTER_S,
    receive,
    send,
)

MAX_THREADS: Final = 4  # forks at once; each may take all of two cores
SHARE: Final = 2  # forks at once for one session
# Seconds for a constraint while those of other sessions wait: thirty times what most take.
HURRIED_S: Final = 3.0
LOOK_INTERVAL_MS: Final = 100.0  # milliseconds between looks at who waits
START_S: Final = 60.0  # seconds for the program to start, which imports torch, on a busy machine


class TooCostly(Exception):
    """The work of a constraint was cut off. How long it would take is not the same for all ranks."""


class NotStarted(Exception):
    """The machine has no process for a constraint, whatever that constraint is."""


# ── threads ───────────────────────────────────────────────────────────────────


@define(eq=False)
class FairThreads:
    """Runs calls of sessions, which take turns. `asking` is the session of the next call."""

    asking: str = ""
    _queues: OrderedDict[str, deque[tuple["Future[Any]", Callable[[], Any]]]] = field(factory=OrderedDict)
    _running: Counter[str] = field(factory=Counter)
    _threads: int = 0
    _changed: threading.Condition = field(factory=threading.Condition)
    _own: threading.local = field(factory=threading.local)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Submit a call, as to an executor of the standard library."""
        future: Future[Any] = Future()
        with self._changed:
            queue = self._queues.setdefault(self.asking, deque())
            queue.append((future, lambda: call(*arguments)))
            if self._threads < MAX_THREADS:
                self._threads += 1
                # A process that ends does not wait for daemon threads.
                threading.Thread(target=self._work, name="constraints", daemon=True).start()
            self._changed.notify()
        return future

    def others_wait(self) -> bool:
        """Whether a session that may have a thread waits for one. This is to be asked within a call."""
        with self._changed:
            return self._next() is not None

    def _next(self) -> str | None:
        return next((each for each in self._queues if self._running[each] < SHARE), None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None)
                session = self._next() or ""
                future, call = self._queues[session].popleft()
                if self._queues[session]:
                    self._queues.move_to_end(session)  # the session goes behind the others
                else:
                    del self._queues[session]
                self._running[session] += 1
            try:
                if future.set_running_or_notify_cancel():
                    _settle(future, call)
            finally:
                with self._changed:
                    self._running[session] -= 1
                    self._running += Counter()  # this drops counts of 0
                    self._changed.notify_all()


def _settle(future: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except (TooCostly, NotStarted) as error:
        # It stays open, and `LateGrammarManager` ends it on all ranks.
        future.ended_by = error  # type: ignore[attr-defined]
    except BaseException as error:
        future.set_exception(error)


# ── the compiler ──────────────────────────────────────────────────────────────


@define(eq=False)
class ForkedCompiler:
    """Stands for xgrammar's compiler. Raises RuntimeError for a text that is no constraint, TooCostly for one
    that is cut off, and NotStarted if there is no process for it.
    """

    info: xgrammar.TokenizerInfo
    hurried: Callable[[], bool]
    _control: socket.socket | None = None
    _program: subprocess.Popen[bytes] | None = None
    _starting: threading.Lock = field(factory=threading.Lock)

    def compile_builtin_json_grammar(self) -> xgrammar.CompiledGrammar:
        return self._ask("compile_builtin_json_grammar")

    def compile_json_schema(self, schema: str, **more: Any) -> xgrammar.CompiledGrammar:
        return self._ask("compile_json_schema", schema=schema, **more)

    def compile_regex(self, regex: str) -> xgrammar.CompiledGrammar:
        return self._ask("compile_regex", regex=regex)

    def compile_grammar(self, grammar: str) -> xgrammar.CompiledGrammar:
        return self._ask("compile_grammar", grammar=grammar)

    def compile_structural_tag(self, structural_tag: Any) -> xgrammar.CompiledGrammar:
        text = structural_tag if isinstance(structural_tag, str) else structural_tag.model_dump_json()
        return self._ask("compile_structural_tag", structural_tag=text)

    def clear_cache(self) -> None:
        """Do nothing, because there is no cache."""

    def close(self) -> None:
        """End the program."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._program is not None:
            self._program.wait()

    def _ask(self, method: str, **arguments: Any) -> xgrammar.CompiledGrammar:
        order = json.dumps({"method": method, "arguments": arguments}).encode()
        with closing(self._open_job()) as job:
            job.settimeout(COMPILE_TIMEOUT_S)
            try:
                (pid,) = struct.unpack("<Q", job.recv(8, socket.MSG_WAITALL))
                fork = os.pidfd_open(pid)  # opened before the fork has its order, so that it still lives
            except (OSError, struct.error) as error:
                raise TooCostly from error
            try:
                send(job, order)
                self._wait(job, fork)
                answer = receive(job)
            except (OSError, EOFError) as error:
                raise TooCostly from error
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fork, signal.SIGKILL)
                os.close(fork)
        kind, data = answer[:1], answer[1:]
        if kind == COSTLY:
            raise TooCostly
        if kind == FAULT:
            raise RuntimeError(data.decode(errors="replace"))
        return xgrammar.CompiledGrammar.deserialize_json(data.decode(errors="surrogatepass"), self.info)

    def _wait(self, job: socket.socket, fork: int) -> None:
        """Return when the fork answers, or has ended. Raises TooCostly."""
        began, nice = time.monotonic(), False
        answered = select.poll()  # not select, which takes no descriptor over 1023
        answered.register(job, select.POLLIN)
        while not answered.poll(LOOK_INTERVAL_MS):
            spent = time.monotonic() - began
            if spent > COMPILE_TIMEOUT_S or (spent > HURRIED_S and self.hurried()):
                raise TooCostly
            if spent > LOW_PRIORITY_AFTER_S and not nice:
                nice = True
                with suppress(OSError):  # each thread has a priority of its own
                    for thread in os.listdir(f"/proc/{_pid_of(fork)}/task"):
                        os.setpriority(os.PRIO_PROCESS, int(thread), 19)

    def _open_job(self) -> socket.socket:
        """A socket to a new fork. The program is started again if it ended."""
        with self._starting:
            for _ in range(2):
                if self._control is None:
                    self._control = self._started()
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(self._control, [b"j"], [theirs.fileno()])
                        return ours
                    except OSError:
                        ours.close()
                        self._control.close()
                        self._control = None
        raise NotStarted("the process that compiles constraints does not start")

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        program = "polarnode.engine.embedded.grammar_process"
        try:
            with theirs:
                number = theirs.fileno()
                self._program = subprocess.Popen(
                    [sys.executable, "-m", program, str(number)],
                    pass_fds=[number],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # the program computes nothing on a GPU
                )
            ours.settimeout(START_S)
            send(ours, self.info.serialize_json().encode(errors="surrogatepass"))
            receive(ours)
        except (OSError, EOFError) as error:
            ours.close()
            raise NotStarted(f"the process that compiles constraints does not start: {error!r}") from error
        ours.settimeout(None)
        return ours


def _pid_of(fork: int) -> int:
    with open(f"/proc/self/fdinfo/{fork}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
