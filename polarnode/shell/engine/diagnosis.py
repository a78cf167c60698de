"""Why an engine host did not start, as one sentence that says which setting to change. Pure: the end of its log in, a sentence out.

Rule for whoever edits it: a row of ADVICE is a pattern seen in a real log and a remedy in the words of the command line; the first that
matches wins, so the more special come first.
"""

import re

from attrs import frozen

TAIL = 65_536  # bytes of log read: a traceback of each of SGLang's processes and the warnings between


@frozen(kw_only=True)
class Diagnosis:
    """`line` is the log's last meaningful one; `chance` says that the very same start may work the next time."""

    line: str
    advice: str
    chance: bool = False


_PORT = r"[Aa]ddress already in use|EADDRINUSE"
ADVICE: tuple[tuple[str, str], ...] = (
    (_PORT, "another program took the port while the engine started: start again"),
    (r"No module named 'sglang'", "install the engine: pip install 'polarnode[gpu]', or see README for a machine without a GPU"),
    (
        r"libcuda\.so|No module named 'sgl_kernel'|common_ops|Torch not compiled with CUDA|No CUDA GPUs|no CUDA-capable device|Found no NVIDIA driver",
        "no usable GPU: start with --cpu, or install the NVIDIA driver and polarnode[gpu]",
    ),
    (r"driver version is insufficient|driver on your system is too old", "the NVIDIA driver is too old for CUDA 13: update it, or start with --cpu"),
    (r"invalid device ordinal", "--gpus names a GPU this machine does not have"),
    (
        r"no GPU memory for the KV cache|mem-fraction-static|Not enough memory|[Oo]ut of memory|OutOfMemory|can't allocate memory",
        "too little memory: lower --mem-fraction if others use the GPU, raise it if the weights leave no room, or lower --context-length, or raise --tp",
    ),
    (r"context.length.*(greater|longer|larger) than|derived.*context", "lower --context-length to what the checkpoint says"),
    (r"divisible|num_attention_heads.*tp|tp_size", "change --tp to a number that divides the model's heads"),
    (r"unexpected keyword argument|ServerArgs", "an extra engine argument is unknown to this SGLang: remove or correct it"),
    (r"dtype", "change the engine's dtype"),
    (r"safetensors|Cannot find any model weights|HeaderTooLarge|size mismatch|state_dict", "the weights under --model can not be read: check them"),
    (
        r"[Mm]odel architectures?.*not supported|Transformers does not recognize|Unrecognized model|config\.json",
        "this SGLang can not serve that model: choose another --model",
    ),
    (r"No space left|Errno 28", "the disk or /dev/shm is full: make room"),
)
_UNKNOWN = 'read the log; with extra engine argument log_level = "info" it says more'
_ERROR = re.compile(r"^\s*(?:\[[^\]]*\]\s*)*((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Exit)\b.*)$")
_NOISE = re.compile(r"kill_process_tree|SIGQUIT|[Ww]arn|resource_tracker|^\s*(File \"|\^|~|During handling)|Ignore import error")


def diagnose(log: str, last_words: str | None = None) -> Diagnosis:
    """`log` is the end of the host's log, `last_words` what the host could still say of itself."""
    line = _told(last_words) or _last_meaningful(log)
    for text in (line, log):
        for pattern, advice in ADVICE:
            if re.search(pattern, text):
                return Diagnosis(line=line, advice=advice, chance=pattern == _PORT)
    return Diagnosis(line=line, advice=_UNKNOWN)


def _told(last_words: str | None) -> str | None:
    """The words unless they only repeat that some other process failed first."""
    return None if last_words is None or "died" in last_words or "EOFError" in last_words else last_words.splitlines()[0]


def _last_meaningful(log: str) -> str:
    lines = [each.strip() for each in log.splitlines() if each.strip()]
    for line in reversed(lines):
        if (found := _ERROR.match(line)) and not _NOISE.search(line):
            return found[1]
    return next((line for line in reversed(lines) if not _NOISE.search(line)), "the log is empty")
