"""The weights a node serves: which, since when, from where, and how they are changed on all of its engine hosts as one version.

Rule for whoever edits this room: a version names one set of weights for ever; it is served by every host of the node or by none, and what is
not so is said in words (`Weights.status`), never guessed.
"""

from polarnode.shell.weights.engine import EngineControl
from polarnode.shell.weights.history import last_weights
from polarnode.shell.weights.values import (
    BroadcastBucket,
    GroupOrder,
    MemoryOrder,
    PauseOrder,
    Served,
    TensorBucket,
    UpdateOpened,
    UpdateOrder,
    UpdateReport,
    WeightsStatus,
)
from polarnode.shell.weights.weights import Weights, open_weights

__all__ = [
    "BroadcastBucket",
    "EngineControl",
    "GroupOrder",
    "MemoryOrder",
    "PauseOrder",
    "Served",
    "TensorBucket",
    "UpdateOpened",
    "UpdateOrder",
    "UpdateReport",
    "Weights",
    "WeightsStatus",
    "last_weights",
    "open_weights",
]
