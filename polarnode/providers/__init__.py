"""The model providers, one folder each: read a request, and write its answer, whole or streamed."""
