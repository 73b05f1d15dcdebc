"""HTTP under the application: Daphne with deadlines, limits, back-pressure and a drain."""
