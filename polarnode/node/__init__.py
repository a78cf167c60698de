"""The node: everything put together."""
