"""The launcher `ray`: Ray Core places supervisors of workers on the machines of a cluster. Ray places and starts; status, lease,
drain and end go over the worker's own control connection, and no token of a request goes through Ray.

`launcher` is the reconciler's part and imports no Ray. `agent` is a process of its own, the only one that is attached to Ray: Ray ends
what is attached to a head that is away. `supervisor` is the actor beside each worker.
"""
