"""Users: one file per dialect, with its requests and the reading of its answers."""
