"""Start engine workers and hear of their state. The reconciler knows only `base`."""
