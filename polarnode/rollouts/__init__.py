"""Captures: sessions whose harness its caller runs. `Captures` is what others hold.

The rule for whoever edits it: what other rooms use is imported from here.
"""
