"""Fixtures that tests of several rooms share."""

from family_fixtures import family_name
from hypothesis import HealthCheck, settings
from podman_parts import podman, runtimes
from qwen3_fixture import deepseek_folder, qwen3_6_folder, qwen3_folder
from wheel_kit import wheel

__all__ = [
    "deepseek_folder",
    "family_name",
    "podman",
    "qwen3_6_folder",
    "qwen3_folder",
    "runtimes",
    "wheel",
]

# a machine under load generates inputs slowly and misses deadlines: neither is a fault of the program
settings.register_profile("polarnode", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("polarnode")
