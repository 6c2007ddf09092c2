"""The names of DESIGN.md, written out: a model that vanishes from the registry fails the contract."""

NANOS = ["paca_nano", "sparseformer_nano", "svit_nano", "vt_nano"]
IMAGE_MODELS = [
    *NANOS,
    "paca_tiny",
    "paca_small",
    "paca_base",
    "paca_mlp_small",
    "paca_ec_tiny",
    "paca_ec_small",
    "paca_ec_base",
    "sparseformer_tiny",
    "sparseformer_small",
    "sparseformer_base",
    "sparseformer_btsp_augreg_base",
    "sparseformer_btsp_augreg_large",
    "sparseformer_btsp_clip_base",
    "sparseformer_btsp_clip_large",
    "svit_small",
    "svit_base",
    "svit_large",
    "vt_resnet18",
    "vt_resnet34",
    "vt_resnet50",
    "vt_resnet101",
]
V2_MODELS = [name for name in IMAGE_MODELS if "_btsp_" in name]
VIDEO_NANOS = ["video_sparseformer_nano"]
VIDEO_MODELS = [
    *VIDEO_NANOS,
    *("video_sparseformer_tiny", "video_sparseformer_small", "video_sparseformer_base"),
]
