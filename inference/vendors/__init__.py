"""Vendor formats that several dialects share; each file is named after the vendor."""
