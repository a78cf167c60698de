"""How many files and sockets this process may have open: as many as the machine lets it.

The usual soft limit of 1,024 is that of programs which use select(), and a node is none: a container takes seven descriptors, its door up to
256 connections, its proxy 64 times two. Whoever is out of descriptors can neither take a connection nor start a container, for any session.
"""

import resource


def lift_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, for this process and those it starts; what it is then."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
