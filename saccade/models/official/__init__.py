"""The authors' checkpoints: one file a family, each with `matches(keys)` and `convert(state_dict)`.

Converters are pure: a dict of tensors in, a new dict out, values untouched but for layout.
"""

from saccade.models.official import paca, resnet, sparseformer, svit

FAMILIES = {"paca": paca, "sparseformer": sparseformer, "svit": svit, "resnet": resnet}
