"""A plane is a listener's application: a route table with authentication and error rendering."""
