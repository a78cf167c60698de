"""Proof of meaning: run trajectories through their checkpoint in transformers, recorded and re-tokenized.

`python -m examples.meaning out/trajectories.jsonl --requests out/requests` prints the table of
docs/token-fidelity.md. Nothing here comes from polarnode except, in `echoes.py`, the reading of a provider's
request.
"""
