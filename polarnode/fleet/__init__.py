"""Starting nodes that share a log: on this machine, and on the machines of a Ray cluster."""
