"""polarnode: rollouts for reinforcement learning of language agents, with unmodified harnesses."""
