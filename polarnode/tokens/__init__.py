"""The model's own language: a conversation into ids, ids back into text, thinking and calls."""
