"""Converts JSON to values with cattrs, and a refusal to one sentence with the path of the field.

Other rooms import only what this package lists. JSON is handled in this package and in the providers' shapes,
nowhere else.
"""

from polarnode.core.codec.arrays import Arrays
from polarnode.core.codec.json import dump_json, plain, read_json, structure
from polarnode.core.codec.packing import pack_trajectory, pack_turn, unpack_trajectory, unpack_turn
from polarnode.core.codec.task_toml import read_toml_value
from polarnode.core.codec.tasks import (
    file_bytes,
    in_workdir,
    read_capture,
    read_capture_end,
    read_task,
    task_json,
)
from polarnode.core.codec.trajectories import Turns, read_trajectory, trajectory_json, turns_json

__all__ = [
    "Arrays",
    "Turns",
    "dump_json",
    "file_bytes",
    "in_workdir",
    "pack_trajectory",
    "pack_turn",
    "plain",
    "read_capture",
    "read_capture_end",
    "read_json",
    "read_task",
    "read_toml_value",
    "read_trajectory",
    "structure",
    "task_json",
    "trajectory_json",
    "turns_json",
    "unpack_trajectory",
    "unpack_turn",
]
