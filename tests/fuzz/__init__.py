"""Fuzz targets for everything that reads files of others; `python -m tests.fuzz image --inputs 1000000`."""
