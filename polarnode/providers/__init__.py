"""One file a provider: read a request, write an answer, whole or streamed."""
