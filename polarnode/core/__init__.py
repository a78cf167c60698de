"""What things are: conversations, tasks, turns, trajectories, errors, ports, plugins, and their codec. Pure
values.
"""
