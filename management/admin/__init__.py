"""The admin site for operators. Every change goes through `management.services`."""

from management.admin import access, adapters, capacity, deployments, registry, usage, users

__all__ = ["access", "adapters", "capacity", "deployments", "registry", "usage", "users"]
