"""Runtimes on Podman: containers with a door inside, a warm pool of them, the images they start from, and what this machine has for it.

The names below are what other rooms import; the modules behind them are this room's own business.
"""

from polarnode.shell.podman.images import Images, ensure_images
from polarnode.shell.podman.pool import RuntimesStatistics
from polarnode.shell.podman.probe import Finding, PodmanFindings, probe
from polarnode.shell.podman.recipes import Recipe, Recipes, default_runtimes_dir, on_top, read_recipes
from polarnode.shell.podman.runtime import PodmanRuntime
from polarnode.shell.podman.runtimes import Runtimes, open_runtimes
from polarnode.shell.podman.settings import RuntimesSettings
from polarnode.shell.podman.store import default_state_dir
from polarnode.shell.podman.task_images import build_task_images

__all__ = [
    "Finding",
    "Images",
    "PodmanFindings",
    "PodmanRuntime",
    "Recipe",
    "Recipes",
    "Runtimes",
    "RuntimesSettings",
    "RuntimesStatistics",
    "build_task_images",
    "default_runtimes_dir",
    "default_state_dir",
    "ensure_images",
    "on_top",
    "open_runtimes",
    "probe",
    "read_recipes",
]
