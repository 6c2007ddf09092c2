"""Reproduce the papers' claims at small scale: declared comparisons, paired runs, statistics, a page of verdicts."""
