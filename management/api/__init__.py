"""The control plane's HTTP APIs, one folder a vendor."""
