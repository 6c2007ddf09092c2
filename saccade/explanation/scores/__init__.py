"""Importance of tokens, and metrics of token maps on labelled images."""
