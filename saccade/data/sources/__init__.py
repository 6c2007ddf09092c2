"""Datasets: labelled images, masks, objects and videos, read by index."""
