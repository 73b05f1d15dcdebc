"""Measures this server and its peers side by side, as their clients. It imports no part of the server."""
