"""The admin site for operators. Every change goes through `management.services`."""

from management.admin import access, capacity, deployments, registry, users

__all__ = ["access", "capacity", "deployments", "registry", "users"]
