"""An engine host without an engine: the same frames, random answers, at the speed of a GPU that need not be
there.

It serves to choose the size of a node, and to load one in benchmarks and tests. It is never a default, and
every trajectory names its model `simulated:…`.
"""
