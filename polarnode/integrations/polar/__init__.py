"""The node's interface with Polar's own routes and JSON; `extension` puts it together."""
