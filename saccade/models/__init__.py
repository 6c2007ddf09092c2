"""The families, one file each. Importing a file registers its variants with timm."""

from saccade.models import paca as paca
from saccade.models import sparseformer as sparseformer
from saccade.models import sparseformer_v2 as sparseformer_v2
from saccade.models import svit as svit
from saccade.models import video_sparseformer as video_sparseformer
from saccade.models import vt as vt
from saccade.weights.tags import register_embedded, register_released

register_released()  # after the families: a tag belongs to a registered model
register_embedded()
