"""The log: what a trainer must not lose and what nodes must agree on, behind one port (`port.py`)."""
