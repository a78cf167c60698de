"""The model providers, a folder each: read a request, write its answer, whole or streamed."""
