"""Pixels in: files to batches of images, masks, boxes and clips."""
