"""A trajectory as Polar's SessionResult, which is what bridges written for Polar read: `session_result`, and what stands around it.

What the format can not carry as its own stands under the name `polarnode` in its metadata: the outcome in our words, weight versions, which
turn each sample is, what was left out and why.
"""

from polarnode.trainers.polar.origin import Origin, origin_of, with_origin
from polarnode.trainers.polar.results import missing_result, session_result
from polarnode.trainers.polar.words import PHASES, STATUSES, outcome_word, task_word

__all__ = [
    "PHASES",
    "STATUSES",
    "Origin",
    "missing_result",
    "origin_of",
    "outcome_word",
    "session_result",
    "task_word",
    "with_origin",
]
