"""Forward hooks that record and change what a model computes."""
