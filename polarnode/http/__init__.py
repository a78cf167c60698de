"""The one HTTP server (Hypercorn, patched here) and what its ASGI apps share."""
