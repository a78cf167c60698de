"""The embedded model: one engine host (child process) per GPU or tensor-parallel group, and the router over them.

`open_engines(settings)` is the door; `Engines` satisfies `ports.Engine`. Rule for whoever edits this room: sglang and torch are never
imported here, they live in the hosts; whatever decides (settings, routing, restarts, diagnosis) is a plain function or a machine beside the
module that waits.
"""

from polarnode.shell.engine.engines import Engines, open_engines
from polarnode.shell.engine.loading import Loaded
from polarnode.shell.engine.settings import EngineSettings, Simulated, unrouted
from polarnode.shell.engine.statistics import EngineStatistics, HostStatistics
from polarnode.shell.engine.update import Update, UpdateMode

__all__ = [
    "EngineSettings",
    "EngineStatistics",
    "Engines",
    "HostStatistics",
    "Loaded",
    "Simulated",
    "Update",
    "UpdateMode",
    "open_engines",
    "unrouted",
]
