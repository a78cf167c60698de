"""One file a harness: how it is started and pointed at its endpoint."""
