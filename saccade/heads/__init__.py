"""Features or tokens -> raw outputs. A head knows channels and strides, never which backbone feeds it."""
