"""How many workers a deployment should have: pure functions of what was measured. No clock, no database, no threads."""
