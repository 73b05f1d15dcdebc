"""Who may ask for how much, and who comes first: permits, rates, standing, and requests that were sent twice."""
