"""The model's own language: conversations become ids, and ids become text, thinking and calls again."""
