"""`conformance`: asks a running server in every dialect and compares the answers with what its vendor's clients need.

It is a client: it knows addresses and wire formats, and imports nothing of the server.
"""
