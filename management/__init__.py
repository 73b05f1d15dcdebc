"""The control plane: the registries, the services that change them, the admin, and the reconciler."""
