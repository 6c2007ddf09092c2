"""The authors' released weight files: model, tag, address, licence, accuracy as printed.

A classifier is MODEL.TAG, a model of another task BACKBONE+HEAD.TAG. The authors publish neither sizes nor hashes:
`megabytes` is that of float32 weights alone.
"""

from pathlib import Path
from typing import Any, NamedTuple

from saccade.weights.download import home

SPARSEFORMER = "https://github.com/showlab/sparseformer/releases/download/v2.0.0-refactor/"
PACA = "https://github.com/iVMCL/PaCaViT/releases/download/pacavit/"
SVIT = "https://drive.google.com/drive/folders/1uaT5OarQd9iPrnFufHocHpM3zhyTcetB"


class Release(NamedTuple):
    """One released file."""

    model: str  # or BACKBONE+HEAD
    tag: str
    url: str  # of the file, or of the page where it has to be downloaded by hand
    megabytes: int
    accuracy: str  # as printed
    options: dict[str, Any] = {}  # noqa: RUF012 # of the model, where they are not the defaults of its name
    licence: str = "mit"  # "" if the authors give none
    note: str = ""  # what could not be verified

    @property
    def name(self) -> str:
        return f"{self.model}.{self.tag}"

    @property
    def backbone(self) -> str:
        return self.model.partition("+")[0]

    @property
    def head(self) -> str:
        return self.model.partition("+")[2]

    @property
    def by_hand(self) -> bool:
        """Whether a person has to download the file: from a consent page, or without a licence."""
        return not self.licence or "drive.google.com" in self.url


def _sparseformer(model: str, file: str, megabytes: int, accuracy: str, tag: str = "in1k") -> Release:
    return Release(model, tag, f"{SPARSEFORMER}{file}_converted.pth", megabytes, accuracy)


def _paca(model: str, tag: str, file: str, millions: float, accuracy: str, note: str = "", **options: Any) -> Release:
    return Release(model, tag, f"{PACA}{file}.pth", round(4 * millions), accuracy, options, note=note)


# Settings of clusters of PaCa-Small (Table 4): suffix of the tag, part of the file's name, options.
_CLUSTERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("c2", "2_0", dict(clusters=(2, 2, 2, 0))),
    ("c49", "49_0", dict(clusters=(49, 49, 49, 0))),
    ("c49_100", "49_100", dict(clusters=(49, 64, 81, 100))),
    ("c100_49", "100_49", dict(clusters=(100, 81, 64, 49))),
    ("c100", "100", dict(clusters=(100, 100, 100, 100))),
    ("blockwise", "100_blockwise", dict(clusters=(100, 100, 100, 100), clustering_scope="block")),
)


def _table4(model: str, tag: str, file: str, values: list[tuple[float, str]], note: str = "") -> list[Release]:
    rows = zip(_CLUSTERS, values, strict=True)
    return [
        _paca(model, f"{tag}_{suffix}", file.format(part), millions, accuracy, note, **options)
        for (suffix, part, options), (millions, accuracy) in rows
    ]


_COCO = "mask_rcnn_pacavit_{}_mstrain_480_800_1x_coco"
_UPERNET = "upernet_pacavit_{}_512x512_160k_ade20k"
_PACAHEAD = "pacahead_pacavit_{}_512x512_160k_ade20k"
_GUESSED = "the authors' page links another file here; this name follows their pattern"
_DETECTOR = "not compared with mmdetection's runtime; masks are pasted by torchvision's rules"

RELEASES: tuple[Release, ...] = (
    _sparseformer("sparseformer_tiny", "sparseformer_v1_tiny", 126, "81.0 top-1"),
    _sparseformer("sparseformer_small", "sparseformer_v1_small", 190, "82.0 top-1"),
    _sparseformer("sparseformer_base", "sparseformer_v1_base", 325, "82.6 top-1"),
    _sparseformer("sparseformer_btsp_augreg_base", "sparseformer_btsp_augreg_base", 257, ""),
    _sparseformer("sparseformer_btsp_augreg_large", "sparseformer_btsp_augreg_large", 850, "84.9 top-1"),
    _sparseformer("sparseformer_btsp_clip_base", "sparseformer_btsp_openai_clip_base", 255, "", "openai"),
    _sparseformer("sparseformer_btsp_clip_large", "sparseformer_btsp_openai_clip_large", 849, "", "openai"),
    Release("svit_small", "in1k", SVIT, 100, "83.6 top-1", licence=""),
    Release("svit_base", "in1k", SVIT, 209, "84.8 top-1", licence=""),
    Release("svit_large", "in1k", SVIT, 381, "85.3 top-1", licence=""),
    _paca("paca_tiny", "in1k", "IMNET_224_pacavit_tiny_p2cconv_100_0", 12.2, "80.9 top-1"),
    _paca("paca_small", "in1k", "IMNET_224_pacavit_small_p2cconv_100_0", 22.0, "83.08 top-1"),
    _paca("paca_mlp_small", "in1k", "IMNET_224_pacavit_small_p2cmlp_100_0", 22.6, "83.13 top-1"),
    _paca("paca_ec_small", "in1k", "IMNET_224_pacavit_convmixer_small_100", 21.1, "83.17 top-1"),
    _paca("paca_base", "in1k", "IMNET_224_pacavit_base_p2cconv_100_0", 46.9, "83.96 top-1"),
    _paca("paca_ec_base", "in1k", "IMNET_224_pacavit_convmixer_base_100", 47.65, "84.22 top-1"),
    *(
        release._replace(note=_GUESSED) if release.tag == "in1k_c100" else release
        for release in _table4(
            "paca_small",
            "in1k",
            "IMNET_224_pacavit_small_p2cconv_{}",
            [
                (22.0, "82.28 top-1"),
                (22.0, "82.95 top-1"),
                (22.2, "82.98 top-1"),
                (22.2, "82.87 top-1"),
                (22.3, "83.05 top-1"),
                (24.1, "82.93 top-1"),
            ],
        )
    ),
    *(
        _paca(f"{model}+mask_rcnn", "coco", _COCO.format(part), millions, accuracy, _DETECTOR)
        for model, part, millions, accuracy in (
            ("paca_tiny", "tiny_p2cconv_100_0", 32.0, "43.3 box AP, 39.6 mask AP"),
            ("paca_small", "small_p2cconv_100_0", 41.8, "46.4 box AP, 41.8 mask AP"),
            ("paca_mlp_small", "small_p2cmlp_100_0", 42.4, "46.6 box AP, 41.9 mask AP"),
            ("paca_ec_small", "convmixer_tiny_100_0", 40.9, "45.8 box AP, 41.4 mask AP"),
            ("paca_base", "base_p2cconv_100_0", 66.6, "48.0 box AP, 42.9 mask AP"),
            ("paca_ec_base", "convmixer_base_100_0", 61.4, "48.3 box AP, 43.3 mask AP"),
        )
    ),
    *_table4(
        "paca_small+mask_rcnn",
        "coco",
        _COCO.format("small_p2cconv_{}"),
        [
            (41.6, "45.5 box AP, 41.1 mask AP"),
            (41.8, "46.2 box AP, 41.6 mask AP"),
            (42.0, "46.1 box AP, 41.5 mask AP"),
            (42.0, "46.1 box AP, 41.7 mask AP"),
            (42.0, "46.4 box AP, 41.8 mask AP"),
            (44.0, "46.5 box AP, 41.8 mask AP"),
        ],
        _DETECTOR,
    ),
    *(
        _paca(f"{model}+{head}", "ade20k", file.format(part), millions, accuracy)
        for model, head, file, part, millions, accuracy in (
            ("paca_tiny", "upernet", _UPERNET, "tiny_p2cconv_100_0", 41.6, "44.49 mIoU"),
            ("paca_small", "upernet", _UPERNET, "small_p2cconv_100_0", 51.4, "47.6 mIoU"),
            ("paca_base", "upernet", _UPERNET, "base_p2cconv_100_0", 77.2, "49.67 mIoU"),
            ("paca_tiny", "paca", _PACAHEAD, "tiny_p2cconv_100_0", 13.3, "45.65 mIoU"),
            ("paca_small", "paca", _PACAHEAD, "small_p2cconv_100_0", 23.2, "48.3 mIoU"),
            ("paca_mlp_small", "paca", _PACAHEAD, "small_p2cmlp_100_0", 24.0, "48.2 mIoU"),
            ("paca_ec_small", "paca", _PACAHEAD, "convmixer_small_100_0", 22.2, "46.2 mIoU"),
            ("paca_base", "paca", _PACAHEAD, "base_p2cconv_100_0", 48.0, "50.39 mIoU"),
            ("paca_ec_base", "paca", _PACAHEAD, "convmixer_base_100_0", 48.8, "48.4 mIoU"),
        )
    ),
    *_table4(
        "paca_small+paca",
        "ade20k",
        _UPERNET.format("small_p2cconv_{}"),
        [
            (23.2, "47.7 mIoU"),
            (23.4, "47.8 mIoU"),
            (23.2, "48.1 mIoU"),
            (23.7, "47.6 mIoU"),
            (23.4, "48.3 mIoU"),
            (25.8, "48.0 mIoU"),
        ],
        "the file's name begins with upernet_, the table says PaCa head",
    ),
)


def cached_file(release: Release, folder: Path | None = None) -> Path:
    """Where the converted file of a release is, or will be: in `folder`, by default the cache."""
    return (folder or home() / "weights") / f"{release.name}.safetensors"


def find(name: str) -> Release | None:
    """Return the release "paca_small.in1k_c49", or for "paca_small" its first; None if there is none."""
    return next((release for release in RELEASES if name in (release.name, release.model)), None)
