"""An agent server of NeMo Gym whose agent is a polarnode: Gym's `/run` becomes a task, and its trajectory
Gym's verify response. Only this package reads and writes Gym's shapes, after its documented models, and
nothing of Gym is imported.
"""
