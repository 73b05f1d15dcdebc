"""How the parts are put together. It imports everything and is imported by none."""
