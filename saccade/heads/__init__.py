"""Features or tokens -> raw outputs. A dense head gives logits a pixel, and a second opinion to train on, or None."""
