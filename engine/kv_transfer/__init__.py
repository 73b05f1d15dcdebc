"""The KV blocks of a prompt move from the worker that computed them to one that goes on with its sequence."""
