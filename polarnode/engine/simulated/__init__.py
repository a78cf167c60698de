"""An engine host without an engine: the same frames, random answers, the speed of a GPU one does not have.

For sizing a node and for loading one in benchmarks and tests; never a default, and every trajectory names its
model `simulated:…`.
"""
