"""Proof of meaning: trajectories through their checkpoint in plain transformers, as they are and as peers
would tokenise them again.

`python -m examples.meaning out/trajectories.jsonl --requests out/requests` prints the table of
docs/token-fidelity.md. Rule for whoever edits it: nothing here comes from polarnode but, in `echoes.py`, the
reading of a provider's request; what is compared is told in the table's words.
"""
