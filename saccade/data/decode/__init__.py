"""Encoded images and videos -> RGB images."""
