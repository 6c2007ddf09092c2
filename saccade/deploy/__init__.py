"""From a trained model to one that only answers: folded, frozen, cast, and launched as one piece; and compiled."""
