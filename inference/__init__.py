"""The data plane: dialects in, tokens out. It uses no ORM and no torch."""
