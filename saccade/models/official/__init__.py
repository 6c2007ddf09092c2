"""The authors' checkpoints: one file per family, each with `matches(keys)` and `convert(state_dict, model)`.

Converters are pure functions: a dict of tensors in, a new dict out; only names and layouts change.
"""

from saccade.models.official import paca, resnet, sparseformer, svit

FAMILIES = {"paca": paca, "sparseformer": sparseformer, "svit": svit, "resnet": resnet}
