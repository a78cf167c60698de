"""Callbacks: each event that a task's trainer asked to be told of is POSTed to its URL until it is taken.

A service of the node. What is owed stands in the journal, written with the event; here is only who is told now. The rules for whoever edits it:
nothing is given up but what the retention took; the order of a task is kept; every attempt ends, and whoever does not answer holds up nobody
but himself. A receiver may be told twice, and knows it by the key.
"""

from polarnode.shell.callbacks.callbacks import Callbacks, open_callbacks
from polarnode.shell.callbacks.values import CallbackStatistics

__all__ = ["CallbackStatistics", "Callbacks", "open_callbacks"]
