"""The durable log: turns as they come, results, consumers and their positions. SQLite in WAL mode, with one
writer thread and group commit. SQL stays in this room.
"""
