"""Video classification: combine the predictions of several views."""

import math

from torch import Tensor


def average_views(logits: Tensor) -> Tensor:
    """logits (B, V, K) of V views -> (B, K): log of the mean probability (SparseFormer Sec. 4.1, 12 views).

    The softmax of the result is the mean of the views' probabilities, so it can be used wherever logits are.
    """
    return logits.float().log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])
