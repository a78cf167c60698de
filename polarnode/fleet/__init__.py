"""Many nodes as one: the front of a fleet, which keeps nothing that a node does not hold."""
