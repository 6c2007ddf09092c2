"""Whole-model transformations for inference: norm folding, casting, CUDA graphs, compile options."""
