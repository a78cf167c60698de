"""Weight updates of an engine without weights: the same orders, refused for the same reasons where those can be seen without torch.

Rule for whoever edits it: what is accepted here must be accepted by a real engine; a payload is only looked at as far as that it is a pickle.
"""

from pathlib import Path
from typing import assert_never

from attrs import define, field

from polarnode.engine_host.checkpoints import BadCheckpoint, Manifest, check_folder
from polarnode.engine_host.updates import (
    BeginUpdate,
    CheckUpdate,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    LoadBroadcast,
    LoadDisk,
    LoadTensors,
    Memory,
    RollBack,
    Update,
)

PICKLE = b"\x80"


@define(eq=False)
class Updates:
    """The weights of one simulated host. `model` is what its checkpoint holds."""

    version: str
    model: Manifest
    _kept: bool = field(default=False, init=False)
    _loaded: int = field(default=0, init=False)
    _groups: set[str] = field(factory=set, init=False)

    def obey(self, order: Update) -> tuple[bool, str]:
        try:
            self._obey(order)
        except BadCheckpoint as error:
            return False, str(error)
        return True, ""

    def _obey(self, order: Update) -> None:
        match order:
            case BeginUpdate():
                self._kept, self._loaded = True, 0
            case LoadDisk() | LoadTensors() | LoadBroadcast():
                self._load(order)
                self._loaded += 1
            case CheckUpdate():
                _insist(self._loaded > 0, "nothing was sent: send every tensor of the model")
            case CommitUpdate(version=version):
                self.version, self._kept = version, False
            case RollBack():
                _insist(self._kept, "nothing was kept to go back to")
                self._kept = False
            case JoinGroup(name=name):
                self._groups.add(name)
            case LeaveGroup(name=name):
                _insist(name in self._groups, "The group to be destroyed does not exist.")
                self._groups.discard(name)
            case Memory():
                raise BadCheckpoint("a simulated engine has no memory to give back")
            case _:
                assert_never(order)

    def _load(self, order: LoadDisk | LoadTensors | LoadBroadcast) -> None:
        match order:
            case LoadDisk(path=path):
                check_folder(Path(path), self.model)
            case LoadTensors(payloads=payloads):
                _insist(all(each.startswith(PICKLE) for each in payloads), "a payload is no pickle")
            case LoadBroadcast(group=group):
                _insist(group in self._groups, f"Group {group} not in {sorted(self._groups)}")
            case _:
                assert_never(order)


def _insist(holds: bool, sentence: str) -> None:
    if not holds:
        raise BadCheckpoint(sentence)
