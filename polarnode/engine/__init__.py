"""The embedded model: one engine host (child process) per GPU or tensor-parallel group, and the router over
them.

`open_engines(settings)` is the door; `Engines` satisfies `ports.Engine`. Rule for whoever edits this room:
sglang and torch are never imported here, they live in the hosts; whatever decides (settings, routing,
restarts, diagnosis) is a plain function or a machine beside the module that waits.
"""
