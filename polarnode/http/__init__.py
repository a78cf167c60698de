"""The two planes: what harnesses reach and what trainers reach."""
