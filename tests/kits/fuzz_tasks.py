"""Tasks, captures and their ends as clients send them, with every field that the control plane knows."""

from typing import Any

TASKS: tuple[dict[str, Any], ...] = (
    {"instruction": "go", "harness": {"name": "pi"}},
    {
        "instruction": "go",
        "task_id": "t1",
        "group_id": "g",
        "num_samples": 4,
        "priority": 3,
        "harness": {
            "name": "shell", "command": ["sh", "-c", "true"], "env": {"A": "b"}, "skills": {"careful": "Be careful."},
            "mcp_servers": {"search": {"url": "http://127.0.0.1:9/mcp", "headers": {"a": "b"}}, "files": {"command": "x", "args": ["y"]}},
        },
        "runtime": {
            "image": "localhost/a:1", "workdir": "/w", "user": "agent", "cpus": 1.5, "memory_mb": 512, "pids": 64, "disk_mb": 100, "env": {"X": "1"},
            "egress": ["*.pypi.example"], "writable": ["/var"], "volumes": [{"source": "/data", "target": "/mnt"}], "artifacts": ["out"],
            "files": [{"path": "a.txt", "text": "x", "mode": 420}, {"path": "b.bin", "base64": "AAE="}],
            "prepare": [{"argv": ["true"], "user": "root"}], "eval_prepare": [{"argv": ["true"]}],
        },
        "builder": {"name": "prefix_merging"},
        "evaluator": {"parts": [{"name": "session_completed", "weight": 1.0}]},
        "budgets": {"init_s": 60, "run_s": 60.5, "post_s": 60, "max_turns": 5, "max_tokens": 1000, "max_repeats": 4, "retries": 1},
        "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 10, "stop": ["x"], "seed": 1},
        "carry": {"top_logprobs": 2},
        "snapshot_at": {"turns": [1], "every": 2, "tool_calls": [3], "entropy": 0.5, "max_mb": 64, "keep": 4},
        "group": {"early_stop_min": 2, "min_usable": 1, "max_staleness": 3},
        "callback_url": "http://127.0.0.1:1/x",
        "metadata": {"a": {"b": [1, 2.5, None, "c"]}},
    },
)  # fmt: skip
CAPTURES: tuple[dict[str, Any], ...] = (
    {"task_id": "t", "group_id": "g", "num_samples": 2, "sample_index": 1, "metadata": {"a": 1}, "budgets": {"run_s": 5}},
)  # fmt: skip
ENDS: tuple[dict[str, Any], ...] = (
    {"reward": 1, "turn_rewards": {"0": 0.5}, "lineage_rewards": {"1": 1}, "metrics": {"a": [1, {"b": None}]}},
)  # fmt: skip
