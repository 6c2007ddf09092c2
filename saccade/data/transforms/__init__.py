"""Preprocessing and augmentation, per sample and per batch."""
