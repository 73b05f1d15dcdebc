"""Traces of requests: the trace context of a call, and what follows a call from its arrival to its end."""
