"""Video classification: what several looks at one video are worth together."""

import math

from torch import Tensor


def average_views(logits: Tensor) -> Tensor:
    """logits (B, V, K) of V views -> (B, K): logarithms of the mean of their probabilities (SF-65).

    Softmax of the result is that mean, and its cross-entropy the mean's, so it stands wherever logits stand.
    """
    return logits.float().log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])
