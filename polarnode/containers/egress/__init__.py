"""Egress: how a container reaches the names its task was allowed, and nothing else.

`NodeEgress` is what a node allows and opens for a session, `Egress` a session's proxy while it is open. The
rules of `rules.py` and the reading of `asking.py` are pure; `dialing.py` alone meets the world.
"""
