"""Whatever waits, and is not the web."""
