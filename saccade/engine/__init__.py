"""Time: recipes, optimiser and schedule, checkpoints, resume, reports. Lightning is the loop."""
