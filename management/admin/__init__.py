"""The admin site for operators. Every change goes through `management.services`."""

from management.admin import access, deployments, registry, users

__all__ = ["access", "deployments", "registry", "users"]
