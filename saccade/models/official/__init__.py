"""The authors' checkpoints: one file per family, each with `matches(keys)` and `convert(state_dict, model)`.

Converters are pure functions: a dict of tensors in, a new dict out; only names and layouts change.
"""

from saccade.models.official import paca, resnet, sparseformer, sparseformer_v2, svit, vt_fpn

# v2 before v1, whose converter also recognises v2's keys
FAMILIES = {
    "paca": paca,
    "sparseformer_btsp": sparseformer_v2,
    "sparseformer": sparseformer,
    "svit": svit,
    "resnet": resnet,
    "vt_fpn": vt_fpn,
}
