"""The trainer's routes: tasks in, trajectories out, numbered and resumable. What a harness can reach never serves this.

The rule for whoever edits it: a route reads its request strictly, asks the service or the journal, and answers; it decides nothing.
"""

from polarnode.web.control_plane.app import create_app
from polarnode.web.control_plane.service import Busy, Conflict, DiskFull, Service, Submitted

__all__ = ["Busy", "Conflict", "DiskFull", "Service", "Submitted", "create_app"]
