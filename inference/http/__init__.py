"""HTTP without dialects: one exchange, routes, bodies, keys, sites."""
