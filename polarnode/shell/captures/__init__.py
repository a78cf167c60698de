"""Captures: sessions whose harness its caller runs. `Captures` is what others hold.

The rule for whoever edits it: what other rooms use is imported from here.
"""

from polarnode.shell.captures.capture import HARNESS, CaptureHouse, CaptureStatus, Opened
from polarnode.shell.captures.captures import Captures

__all__ = ["HARNESS", "CaptureHouse", "CaptureStatus", "Captures", "Opened"]
