"""A GRPO loop: a node with a real harness in Podman, a plain trainer, weights updated in place.

See docs/learning.md.
"""
