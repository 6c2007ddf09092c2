"""Video classification: combine the predictions of several views."""

import math

from torch import Tensor


def average_views(logits: Tensor, multi_label: bool = False) -> Tensor:
    """logits (B, V, K) of V views -> (B, K): log of the mean probability (SparseFormer Sec. 4.1, 12 views).

    The softmax of the result (with `multi_label`, its sigmoid) is the mean of the views' probabilities, so it can be
    used wherever logits are.
    """
    if multi_label:
        return logits.float().sigmoid().mean(1).logit(1e-7)
    return logits.float().log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])
