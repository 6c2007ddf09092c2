"""The names of DESIGN.md, written out: a model that vanishes from the registry fails the contract."""

NANOS = ["svit_nano"]
IMAGE_MODELS = [*NANOS, "svit_small", "svit_base", "svit_large"]
VIDEO_MODELS: list[str] = []
