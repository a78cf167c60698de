"""What a host learned of its sessions, as a file of the state folder: a restarted node begins with it.

The file only saves learning: it has sizes of sessions that ended and the margin, and not what is in the
cache, which a start empties. So it is not synced to the disk, and a file that cannot be read costs only a
warning.
"""

import logging
from pathlib import Path
from typing import Final

from attrs import asdict

from polarnode.core.codec.json import dump_json, read_json, structure
from polarnode.core.errors import Refused
from polarnode.engine.residency import LearnedSizes
from polarnode.support.bounded import written_whole

logger = logging.getLogger(__name__)

# Bytes: a kind has 64 sizes of at most 8 digits, 0.6 kB, and 32 kinds are kept. This is three times that, to
# leave room for their names.
MOST_BYTES: Final = 64 << 10


def read_learned(path: Path) -> LearnedSizes | None:
    """What an earlier node wrote there. None where there is nothing, or nothing that can be read."""
    try:
        with path.open("rb") as file:
            found = file.read(MOST_BYTES + 1)
        if len(found) > MOST_BYTES:
            raise Refused(f"it has more than {MOST_BYTES} bytes")
        return structure(read_json(found), LearnedSizes)
    except FileNotFoundError:
        return None
    except (OSError, Refused) as error:
        logger.warning(
            "%s, the sizes of sessions that a node before learned, cannot be read (%s): they are learned"
            " again, and the file is written anew; if that fails too, remove it",
            path,
            error,
        )
        return None


def write_learned(path: Path, learned: LearnedSizes) -> None:
    """Replace the file. If the disk refuses it, that costs only a warning."""
    try:
        with written_whole(path) as file:
            file.write(dump_json(asdict(learned)))
    except OSError as error:
        logger.warning(
            "the learned sizes of sessions cannot be kept in %s (%s): make room or fix its rights; until then"
            " a restarted node learns them again",
            path,
            error,
        )
