"""The log in PostgreSQL, for nodes that are many. `postgres.py` puts the modules of this folder together."""
