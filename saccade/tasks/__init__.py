"""What outputs mean: loss, decoding, metric."""
