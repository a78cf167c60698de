"""Model calls that were recorded elsewhere, merged into training sequences by their token ids alone: no message, no template, no tokenizer.

Whoever edits this room decides only where a prompt attaches; rows and laws are `merge.builders` and `merge.checks`, as for turns of our own.
"""
