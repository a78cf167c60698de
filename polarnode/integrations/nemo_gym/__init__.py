"""An agent server of NeMo Gym whose agent is a polarnode: Gym's `/run` becomes a task, and its trajectory
Gym's verify response. Gym's shapes are read and written here alone, after its documented models, and nothing
of Gym is imported.
"""
