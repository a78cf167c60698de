"""Which weights a node begins with: those it served last, where a disk still has them.

Rule for whoever edits it: whatever is not served although it was, is said at once (`say`) and for as long as it is so (`warning`).
"""

from collections.abc import Callable
from pathlib import Path

from polarnode.config import NodeConfig
from polarnode.shell.engine import Loaded
from polarnode.shell.journal import Journal
from polarnode.shell.weights import last_weights


def weights_model(config: NodeConfig) -> str:
    """The checkpoint a node is started with, as the history knows it."""
    return str(Path(config.model).resolve())


async def weights_to_begin_with(config: NodeConfig, journal: Journal, say: Callable[[str], None]) -> tuple[Loaded | None, str | None]:
    """The last version of this journal, or what is wrong with it."""
    loaded, warning = await last_weights(journal, weights_model(config), resume=config.resume_weights)
    if loaded is not None:
        say(f"serving weights {loaded.version!r} from {loaded.path}, the last of this journal")
    if warning is not None:
        say(warning)
    return loaded, warning
