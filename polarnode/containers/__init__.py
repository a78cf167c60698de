"""Runtimes on Podman: containers with a door inside, a warm pool of them, the images they start from, and
what this machine has for it.

The names below are what other rooms import; the modules behind them are this room's own business.
"""
