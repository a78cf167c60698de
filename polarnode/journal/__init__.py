"""The durable log: turns as they come, results, consumers and their positions. SQLite in WAL mode, one writer
thread, group commit.

The rule for whoever edits it: other rooms import from here; SQL stays in `schema`, `entries`, `pruning` and
`reads`.
"""
