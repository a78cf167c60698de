"""Fixtures that tests of several rooms share."""

from family_fixtures import family_name
from podman_parts import podman, runtimes
from qwen3_fixture import deepseek_folder, qwen3_6_folder, qwen3_folder

__all__ = [
    "deepseek_folder",
    "family_name",
    "podman",
    "qwen3_6_folder",
    "qwen3_folder",
    "runtimes",
]
