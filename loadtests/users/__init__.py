"""Users: one file per dialect, with its requests and the parsing of its frames."""
