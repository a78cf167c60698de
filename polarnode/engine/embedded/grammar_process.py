"""The process in which constraints are compiled and tried, each in a fork of its own that can be killed.

xgrammar's compiler cannot be stopped: some short constraints keep it busy for hours, and some text ends its
process. So this program holds the vocabulary, has no thread, and forks for each constraint. The fork
compiles, tries some steps of sampling, writes what came of it, and ends. The kernel ends it after
COMPILE_TIMEOUT_S, whatever it does. The program imports nothing of SGLang, which takes seconds.
"""

import ctypes
import gc
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import xgrammar

# Seconds of CPU for one constraint: a schema of 2,000 words in 40 objects takes five at 150 000 tokens, ten
# times what a harness's own takes. Then seconds in all, for a machine on which a fork gets half a core.
COMPILE_CPU_S: Final = 10.0
COMPILE_TIMEOUT_S: Final = 20.0
# Seconds after which a fork gets only the CPU that others leave. Most constraints take a tenth of that time.
LOW_PRIORITY_AFTER_S: Final = 1.0
COMPILER_THREADS: Final = 2  # threads of the compiler; more would take the cores of the harnesses
MAX_EXTRA_BYTES: Final = 2 << 30  # bytes more than the program has; the schema above takes 0.3 GB
# Bytes of a compiled grammar, which is read in a second: twice the schema above.
MOST_BYTES: Final = 128 << 20
# Seconds of CPU for the mask and the parse of one token, for which all sessions of an engine wait.
STEP_S: Final = 0.05
# Tokens of an answer that is made up, and seconds of CPU for all of it, 5 ms each. The cost of an ambiguous
# grammar grows with the text and shows within some dozens of tokens.
TRIAL_STEPS: Final = 200
MAX_TRIAL_S: Final = 1.0
TRIALS: Final = 2  # answers that are made up, by chance, but always the same
PDEATHSIG: Final = 1  # option of prctl: the signal that comes when the parent has died
# What a fork answers: a grammar; a sentence about the text; that the constraint costs too much.
GRAMMAR, FAULT, COSTLY = b"g", b"f", b"c"
# The characters of a bounded string in xgrammar's text of a schema, and those of JSON (RFC 8259, section 7).
LOOSE_CHARACTERS, STRICT_CHARACTERS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"


class StrictStringCompiler(xgrammar.GrammarCompiler):
    """A compiler for strings as JSON has them. xgrammar 0.2.7 lets a string with `minLength` or `maxLength`
    hold raw control characters, which JSON does not allow. In the grammar's text, their class of characters
    becomes that of any other string.
    """

    def compile_json_schema(self, *schema: Any, **more: Any) -> xgrammar.CompiledGrammar:
        grammar = xgrammar.Grammar.from_json_schema(*schema, **more)
        text = str(grammar)
        if LOOSE_CHARACTERS in text:
            grammar = xgrammar.Grammar.from_ebnf(text.replace(LOOSE_CHARACTERS, STRICT_CHARACTERS))
        return self.compile_grammar(grammar)


def send(to: socket.socket, data: bytes) -> None:
    to.sendall(struct.pack("<Q", len(data)) + data)


def receive(source: socket.socket) -> bytes:
    """One message. Raises EOFError if the other side ended before its end."""
    (length,) = struct.unpack("<Q", _receive_exactly(source, 8))
    return _receive_exactly(source, length)


def _receive_exactly(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = source.recv(min(1 << 20, length - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# ── in a fork ─────────────────────────────────────────────────────────────────


def compiled(info: xgrammar.TokenizerInfo, method: str, arguments: dict[str, Any]) -> tuple[bytes, bytes]:
    """What came of a constraint: one of GRAMMAR, FAULT, COSTLY, and its data."""
    compiler = StrictStringCompiler(info, max_threads=COMPILER_THREADS, cache_enabled=False)
    try:
        grammar = getattr(compiler, method)(**arguments)
    except MemoryError:
        return COSTLY, b""
    except Exception as error:  # an isolation edge: whatever xgrammar finds wrong is the text's fault
        return FAULT, str(error).encode(errors="replace")
    if any(is_costly(grammar, info, seed) for seed in range(TRIALS)):
        return COSTLY, b""
    data = grammar.serialize_json().encode(errors="surrogatepass")
    return (GRAMMAR, data) if len(data) <= MOST_BYTES else (COSTLY, b"")


def is_costly(grammar: xgrammar.CompiledGrammar, info: xgrammar.TokenizerInfo, seed: int) -> bool:
    """Whether an answer that is made up by chance has a step that takes more CPU than STEP_S, or all steps
    together take more than MAX_TRIAL_S. A token after which the text could only end is taken back, because
    texts that go on cost most.
    """
    chance, matcher = random.Random(seed), xgrammar.GrammarMatcher(grammar)
    mask, ends = xgrammar.allocate_token_bitmask(1, info.vocab_size), set(info.stop_token_ids)
    taken: list[int] = []
    spent = 0.0
    for _ in range(TRIAL_STEPS):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        step = time.thread_time() - began
        token = _allowed(mask, info.vocab_size, ends, chance)
        began = time.thread_time()
        if token is not None and matcher.accept_token(token):
            taken.append(token)
        step += time.thread_time() - began
        spent += step
        if step > STEP_S or spent > MAX_TRIAL_S:
            return True
        if token is None or matcher.is_terminated():
            if not taken:
                return False
            matcher.rollback(1)
            ends.add(taken.pop())
    return False


def _allowed(mask: torch.Tensor, size: int, ends: set[int], chance: random.Random) -> int | None:
    """A token that the mask allows and that does not end the text."""
    words = torch.nonzero(mask[0]).flatten()
    # A mask that allows more tokens shows another one within 20 looks.
    for _ in range(20 if len(words) else 0):
        word = int(words[chance.randrange(len(words))])
        bits = int(mask[0, word]) & 0xFFFFFFFF
        token = word * 32 + chance.choice([bit for bit in range(32) if bits >> bit & 1])
        if token < size and token not in ends:
            return token
    return None


def _run_fork(job: socket.socket, info: xgrammar.TokenizerInfo, most: int) -> None:
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    # The signals of these timers end the process, whatever holds the GIL.
    signal.setitimer(signal.ITIMER_REAL, COMPILE_TIMEOUT_S)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job.sendall(struct.pack("<Q", os.getpid()))
    order = json.loads(receive(job))
    kind, data = compiled(info, order["method"], order["arguments"])
    send(job, kind + data)


# ── the program ───────────────────────────────────────────────────────────────


def _data_bytes() -> int:
    """The private memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def main(descriptor: int) -> None:
    """Fork for each socket that comes through `descriptor`, until its other end is closed."""
    control = socket.socket(fileno=descriptor)
    info = xgrammar.TokenizerInfo.deserialize_json(receive(control).decode(errors="surrogatepass"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no code waits for a fork
    most = _data_bytes() + MAX_EXTRA_BYTES
    gc.freeze()
    send(control, b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as job:
            if os.fork() == 0:
                try:
                    control.close()
                    _run_fork(job, info, most)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
