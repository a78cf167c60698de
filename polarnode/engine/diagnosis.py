"""Why an engine host did not start or died, from its log, and what to do. Pure.

A row of ADVICE is a pattern seen in a real log and a remedy in the words of the command line. The first match
wins, so special patterns come first.
"""

import re

from attrs import frozen

# Bytes of the log that are read: a traceback of each of SGLang's processes and the warnings between them.
TAIL = 65_536


@frozen(kw_only=True)
class Diagnosis:
    """`line` is the log's last meaningful line. `chance` says that the same start may work the next time."""

    line: str
    advice: str
    chance: bool = False


_PORT_TAKEN = r"[Aa]ddress already in use|EADDRINUSE"
_NO_GPU = (
    r"libcuda\.so|No module named 'sgl_kernel'|common_ops|Torch not compiled with CUDA|No CUDA GPUs"
    r"|no CUDA-capable device|Found no NVIDIA driver"
)
# Patterns that stand in the log of an engine on a CPU for a reason of their own.
CPU_ADVICE: tuple[tuple[str, str], ...] = (
    (
        _NO_GPU,
        "an argument of --engine-arg needs SGLang's kernels for GPUs, and --cpu has none: leave it out",
    ),
)
ADVICE: tuple[tuple[str, str], ...] = (
    (_PORT_TAKEN, "another program took the port while the engine started: start again"),
    (
        r"No module named 'sglang'",
        "install the engine: pip install 'polarnode[gpu]', or see README for a machine without a GPU",
    ),
    (
        _NO_GPU,
        "no usable GPU: start with --cpu, or install the NVIDIA driver and polarnode[gpu]",
    ),
    (
        r"driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is too old for CUDA 13: update it, or start with --cpu",
    ),
    (r"invalid device ordinal", "--gpus names a GPU this machine does not have"),
    (
        r"Not enough host memory",
        "the machine has too little main memory for that cache of each GPU: lower host_cache_gb",
    ),
    (
        (
            r"no GPU memory for the KV cache|mem-fraction-static|Not enough memory|[Oo]ut of"
            r" memory|OutOfMemory|can't allocate memory"
        ),
        (
            "too little memory: lower --mem-fraction if others use the GPU, raise it if the weights leave no"
            " room, or lower --context-length, or raise --tp"
        ),
    ),
    (
        r"context.length.*(greater|longer|larger) than|derived.*context",
        "lower --context-length to what the checkpoint says",
    ),
    (r"divisible|num_attention_heads.*tp|tp_size", "change --tp to a number that divides the model's heads"),
    (
        r"unexpected keyword argument|ServerArgs",
        "an argument of --engine-arg is unknown to this SGLang: remove or correct it",
    ),
    (r"dtype", "change the engine's dtype"),
    (
        r"safetensors|Cannot find any model weights|HeaderTooLarge|size mismatch|state_dict",
        "the weights under --model cannot be read: check them",
    ),
    (
        (
            r"[Mm]odel architectures?.*not supported|Transformers does not recognize|Unrecognized"
            r" model|config\.json"
        ),
        "this SGLang cannot serve that model: choose another --model",
    ),
    (r"No space left|Errno 28", "the disk or /dev/shm is full: make room"),
)
_UNKNOWN_ADVICE = "read the log; with --engine-arg log_level=info it says more"
_ERROR = re.compile(r"^\s*(?:\[[^\]]*\]\s*)*((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Exit)\b.*)$")
_NOISE_LINE = re.compile(
    r"kill_process_tree|SIGQUIT|[Ww]arn|resource_tracker|^\s*(File \"|\^|~|During handling)|Ignore import"
    r" error"
)


def diagnose(log: str, fatal_message: str | None = None, *, cpu: bool = False) -> Diagnosis:
    """Find the cause and the advice. `log` is the end of the host's log, `fatal_message` the host's last
    message about its end, and `cpu` says that it was started for a CPU.
    """
    line = _first_line(fatal_message) or _last_meaningful(log)
    for text in (line, log):
        for pattern, advice in (*CPU_ADVICE, *ADVICE) if cpu else ADVICE:
            if re.search(pattern, text):
                return Diagnosis(line=line, advice=advice, chance=pattern == _PORT_TAKEN)
    return Diagnosis(line=line, advice=_UNKNOWN_ADVICE)


def _first_line(fatal_message: str | None) -> str | None:
    """The first line of the message. None if it only repeats that another process failed first."""
    return (
        None
        if fatal_message is None or "died" in fatal_message or "EOFError" in fatal_message
        else fatal_message.splitlines()[0]
    )


def _last_meaningful(log: str) -> str:
    lines = [each.strip() for each in log.splitlines() if each.strip()]
    for line in reversed(lines):
        if (found := _ERROR.match(line)) and not _NOISE_LINE.search(line):
            return found[1]
    return next((line for line in reversed(lines) if not _NOISE_LINE.search(line)), "the log is empty")
