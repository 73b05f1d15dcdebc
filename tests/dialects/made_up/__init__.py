"""A dialect that no vendor has: the folder that `docs/contributing.md` asks for, complete."""
