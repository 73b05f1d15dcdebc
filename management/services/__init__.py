"""The only writers of the registries: plain functions, each in one transaction with its audit event."""
