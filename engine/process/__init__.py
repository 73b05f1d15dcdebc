"""The worker process itself: its progress reports, its log, and the CPUs that it may use."""
