"""From a trained model to one that only answers: folded, frozen, cast, launched as one piece; or compiled."""
