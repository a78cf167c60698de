"""The node under Polar's own routes and JSON: `extension` puts it together."""
