"""Logs of starts that failed, as SGLang 0.5.23 and torch wrote them, and the sentence each becomes."""

import pytest

from polarnode.engine.diagnosis import diagnose

TRACEBACK = """\
[2026-11-21 10:26:42] Ignore import error when loading sglang.srt.models.mamba: cannot import name 'causal_conv1d_fn'
Traceback (most recent call last):
  File "/x/scheduler.py", line 1, in run_scheduler_process
    scheduler = Scheduler(
  File "/x/pool.py", line 9, in init
{error}

[2026-11-21 10:26:43] Received sigquit from a child process. It usually means the child failed.
[2026-11-21 10:26:43] kill_process_tree called: parent_pid=1, include_parent=True, pid=1
"""


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            (
                "RuntimeError: Loaded weights leave no GPU memory for the KV cache under"
                " --mem-fraction-static=0.1"
            ),
            "--mem-fraction",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "--mem-fraction"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "--cpu"),
        ("AssertionError: Torch not compiled with CUDA enabled", "--cpu"),
        ("RuntimeError: No CUDA GPUs are available", "--cpu"),
        ("RuntimeError: CUDA error: invalid device ordinal", "--gpus"),
        (
            (
                "torch.distributed.DistNetworkError: The server socket has failed to listen: errno: 98 -"
                " Address already in use"
            ),
            "start again",
        ),
        ("ModuleNotFoundError: No module named 'sglang'", "install the engine"),
        (
            "ValueError: User-specified context_length (99) is greater than the derived context_length (9).",
            "--context-length",
        ),
        ("ValueError: Model architectures ['X'] are not supported for now.", "--model"),
        ("RuntimeError: Cannot find any model weights with `/m`", "weights under --model"),
        (
            "TypeError: ServerArgs.__init__() got an unexpected keyword argument 'max_prefil'",
            "--engine-arg",
        ),
        ("OSError: [Errno 28] No space left on device", "make room"),
    ],
)
def test_known_failure_names_its_remedy(error: str, remedy: str) -> None:
    found = diagnose(TRACEBACK.format(error=error))
    assert found.line == error
    assert remedy in found.advice


def test_only_port_race_repeats_start() -> None:
    assert diagnose(TRACEBACK.format(error="OSError: [Errno 98] Address already in use")).chance
    assert not diagnose(TRACEBACK.format(error="ValueError: bad")).chance


def test_host_message_precedes_its_log() -> None:
    found = diagnose(
        TRACEBACK.format(error="RuntimeError: No CUDA GPUs are available"),
        "ValueError: tp_size must divide\nand more",
    )
    assert found.line == "ValueError: tp_size must divide"
    assert "--tp" in found.advice


@pytest.mark.parametrize("words", ["the engine's process scheduler died", "EOFError: "])
def test_vague_log_lines_are_skipped(words: str) -> None:
    """A line that only says that another process failed is no diagnosis."""
    assert (
        diagnose(TRACEBACK.format(error="RuntimeError: No CUDA GPUs are available"), words).line
        == "RuntimeError: No CUDA GPUs are available"
    )


def test_unknown_failure_shows_last_line() -> None:
    found = diagnose("starting\nsomething odd happened\n[x] UserWarning: noise\n")
    assert found.line == "something odd happened"
    assert "read the log" in found.advice


def test_empty_log_is_reported() -> None:
    assert diagnose("").line == "the log is empty"


def test_missing_kernel_has_remedy() -> None:
    """On a CPU it is an argument's, and there is no way to --cpu."""
    log = TRACEBACK.format(error="ModuleNotFoundError: No module named 'sgl_kernel'")
    assert "no usable GPU: start with --cpu" in diagnose(log).advice
    assert diagnose(log, cpu=True).advice == (
        "an argument of --engine-arg needs SGLang's kernels for GPUs, and --cpu has none: leave it out"
    )
