"""The trainer's routes: tasks in, trajectories out, numbered and resumable. What a harness can reach never
serves this.

The rule for whoever edits it: a route reads its request strictly, asks the service or the journal, and
answers; it decides nothing.
"""
