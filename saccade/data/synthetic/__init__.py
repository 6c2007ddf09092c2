"""Embedded datasets, rendered on the fly, and the bundled photographs."""

SPLIT_SEEDS = {"train": 0, "val": 1, "test": 2}  # second entry of every seed, so that splits share no sample
