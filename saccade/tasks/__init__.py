"""Tasks: losses, decoding, metrics and model builders."""
