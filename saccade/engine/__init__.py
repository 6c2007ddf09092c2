"""Training: recipes, the Lightning module, schedules, checkpoints, reports; `tasks/` trains and evaluates each task."""
