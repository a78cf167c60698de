"""One file an evaluator, given a Runtime and what the session recorded."""
