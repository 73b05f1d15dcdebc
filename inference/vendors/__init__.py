"""Pieces of a vendor's wire that several dialects speak, each file named after the vendor whose it is."""
