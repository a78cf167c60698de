"""Runtimes on Podman: containers with a model endpoint inside, a warm pool, images and egress."""
