"""The control plane: registries, their services, the admin, and the reconciler that makes them true."""
