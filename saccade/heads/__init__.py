"""Heads: features or tokens -> raw outputs. A head knows channels and strides, not the backbone."""
