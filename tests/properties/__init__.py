"""Properties that every operation and grouping module has, with hypothesis."""
