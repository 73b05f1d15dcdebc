"""HTTP without dialects: the exchange, routes, bodies, API keys, admission, sites."""
