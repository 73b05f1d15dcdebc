"""The HTTP server: Daphne with deadlines, limits, back-pressure and graceful shutdown."""
