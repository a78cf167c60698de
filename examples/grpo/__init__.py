"""A loop that learns: a node with a real harness in Podman, a plain GRPO trainer, and the weights going back
into the node. docs/learning.md.
"""
