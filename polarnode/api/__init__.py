"""The trainer's routes: tasks in, trajectories out, numbered and resumable. No harness can reach them.

A route reads its request strictly, calls the service or the journal, and answers; it decides nothing.
"""
