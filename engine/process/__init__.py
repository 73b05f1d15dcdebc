"""The worker process itself: what it is doing, its log, the CPUs that it may use."""
