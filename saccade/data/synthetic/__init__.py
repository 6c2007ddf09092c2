"""Embedded datasets, rendered on the fly, and the bundled photographs."""
