"""The engine: one host (child process) per GPU or tensor-parallel group, routing over them, and their
weights.

`engines.open_engines(settings)` starts them, and `Engines` satisfies `core.ports.Engine`. sglang and torch
are never imported here: they live in the child, `embedded/`. The child of an external engine, `external.py`,
stands before a server that somebody else runs. What decides (settings, routing, restarts, diagnosis) is a
plain function or a state machine; what waits is a module beside it.
"""
