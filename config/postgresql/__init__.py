"""Django's database backend for PostgreSQL, with a timeout for every wait."""
