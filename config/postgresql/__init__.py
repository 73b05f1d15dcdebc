"""Django's database backend for PostgreSQL, with an end to every wait."""
