"""Stage limits that follow the machine and the engine: what is read (`readings`), what follows from it (`decision`), and who does it (`watch`)."""

from polarnode.shell.pressure.decision import Bounds, Readings, Standing, State, begin, decide
from polarnode.shell.pressure.readings import read_machine
from polarnode.shell.pressure.watch import PressureWatch

__all__ = ["Bounds", "PressureWatch", "Readings", "Standing", "State", "begin", "decide", "read_machine"]
