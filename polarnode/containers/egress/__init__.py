"""Egress: a proxy in a session's container to the names its task may reach."""
