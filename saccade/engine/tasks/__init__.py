"""Training and evaluation of each task."""
