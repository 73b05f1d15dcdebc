"""A plane is a listener's application: a route table with keys and errors."""
