"""The control plane: the routes over which a trainer submits tasks and reads trajectories. No harness can
reach them.

A route validates its request, calls the service or the journal, and answers. It makes no decisions.
"""
