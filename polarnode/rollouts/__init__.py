"""Rollouts: tasks become sessions, and sessions become trajectories."""
