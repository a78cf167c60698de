"""polarnode: reinforcement learning of language agents on the harnesses people really use."""
