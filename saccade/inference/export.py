"""Write a model as an ONNX or pt2 file that needs neither saccade's operators nor, for ONNX, torch.

`saccade.ops` keeps to its references while torch.export traces, so the files contain ATen or ONNX operators only.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from saccade._errors import UsageError
from saccade._extras import package_version, require
from saccade._files import replaced_file, write_file
from saccade.heads.mask_rcnn import RegionDetector
from saccade.inference import region_graphs
from saccade.inference.optimize import cast as cast_weights
from saccade.inference.region_graphs import MaskGraph, ProposalGraph, RegionGraph
from saccade.models.card import Card, Preprocess
from saccade.tasks.detection import DETECTORS
from saccade.tasks.load import card_of
from saccade.tasks.sparse_detector import SparseDetector

FORMATS = ("onnx", "pt2")
AXES = ("batch", "size")
DTYPES = (torch.float32, torch.float16, torch.int8)
MIN_QUANTIZED = 1024  # values; smaller weights stay float32 in an int8 file
EXAMPLE_SIZE = (64, 96)  # traced with dynamic height and width; different sides, so that none is taken for the other
FILTERS = {"bilinear": 1.0, "bicubic": 2.0}  # interpolation -> radius of Pillow's filter in pixels
METADATA = "saccade"  # key of the JSON in an ONNX file; saccade.json in a pt2 file
OUTPUTS = {
    "classification": ("logits",),
    "segmentation": ("logits",),
    "detection": ("boxes", "labels", "scores"),
}


class ExportError(ValueError):
    """A model cannot be exported as requested; the message says why and what to do."""


class ExportOptionError(ExportError, UsageError):
    """An option of the export is unknown, or the model or another option excludes it."""


class Export(NamedTuple):
    """A written file and the metadata in it."""

    path: Path
    bytes: int  # of all files
    metadata: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        """The file, and the files that it needs next to it."""
        return [self.path, *(self.path.parent / part["file"] for part in self.metadata.get("graphs", {}).values())]


def export_model(
    model: nn.Module,
    path: str | os.PathLike,
    format: str = "onnx",
    dynamic: Sequence[str] = AXES,
    dtype: torch.dtype | None = None,
    with_preprocessing: bool = False,
    card: Card | None = None,
    size: int | None = None,
) -> Export:
    """Write a classifier, segmenter, video model or detector to `path`, atomically.

    Inputs are RGB `images` (B, 3, H, W), or clips (B, 3, T, H, W). Outputs are float32: `logits` (B, K) of a
    classifier, `logits` (B, K, H, W) of a segmenter; `boxes` (B, P, 4) in pixels, `labels` (B, P) from 1 and `scores`
    (B, P) of a sparse detector, one per token and neither sorted nor thresholded. The metadata has the class names,
    the preprocessing and the card. Mask R-CNN and its cascade become up to three ONNX files (`export_regions`).

    Args:
        dynamic: axes that vary at run time: "batch", "size" (height and width). The others are those of the example.
        dtype: torch.float16 stores and computes in half precision; inputs and outputs stay float32. torch.int8 stores
            the weights of matrix products and convolutions as int8 and computes in float32 (ONNX).
        with_preprocessing: the graph takes uint8 images of any size and resizes, crops and normalises them itself.
        card: of the model's checkpoint; None describes the model from its timm configuration.
        size: height and width where they are not dynamic (default: the card's).
    """
    _check_options(model, format, dynamic, dtype)
    path = Path(path)
    card = card or card_of(model)
    if isinstance(model, RegionDetector):
        if with_preprocessing:
            preprocess_graph(card)  # refuses
        return export_regions(model, path, dynamic, dtype, card, size)
    graph = make_graph(model, card, None if dtype == torch.int8 else dtype, with_preprocessing)
    example, axes = example_input(card, dynamic, with_preprocessing, size)
    program = trace(graph, {"images": example}, {"images": axes})
    metadata = describe_export(model, card, example, axes, dtype, with_preprocessing)
    if format == "onnx":
        write_file(path, onnx_bytes(program, metadata, {"images": axes}, metadata["outputs"]))
    else:
        with replaced_file(path) as temporary:
            torch.export.save(program, temporary, extra_files={f"{METADATA}.json": json.dumps(metadata)})
    return Export(path, path.stat().st_size, metadata)


def _check_options(model: nn.Module, format: str, dynamic: Sequence[str], dtype: torch.dtype | None) -> None:
    if format not in FORMATS:
        raise ExportOptionError(f"expected format {' or '.join(FORMATS)}, got {format!r}.")
    if format == "onnx":
        for package in ("onnx", "onnxscript"):
            require(package, "export")
    if unknown := set(dynamic) - set(AXES):
        raise ExportOptionError(
            f"expected dynamic axes out of {', '.join(AXES)}; got {', '.join(sorted(unknown)) or 'an empty name'}."
        )
    if dtype is not None and dtype not in DTYPES:
        expected = " or ".join(str(value).removeprefix("torch.") for value in DTYPES)
        raise ExportOptionError(f"expected dtype {expected}, got {str(dtype).removeprefix('torch.')}.")
    if dtype == torch.int8 and format != "onnx":
        raise ExportOptionError(f"int8 weights are for onnx files, got format {format}. Use float16 or float32.")
    if isinstance(model, RegionDetector) and format != "onnx":
        raise ExportOptionError(
            "Mask R-CNN and Cascade Mask R-CNN are exported to onnx, got format pt2: their pt2 files would need "
            "torchvision's operators, and its code between them. Use --format onnx, or the checkpoint."
        )


def export_regions(
    model: RegionDetector,
    path: Path,
    dynamic: Sequence[str],
    dtype: torch.dtype | None,
    card: Card,
    size: int | None,
) -> Export:
    """Write Mask R-CNN or its cascade as NAME.onnx (proposals), NAME.regions.onnx and NAME.masks.onnx.

    The metadata of NAME.onnx has the names and hashes of the other files. It is written last: an interrupted export
    leaves files that `OnnxModel` refuses, not a mixture.
    """
    if path.with_suffix("").suffix in (".regions", ".masks"):
        raise ExportOptionError(
            f"expected another name than {path.name}: the export writes NAME.regions.onnx beside NAME.onnx."
        )
    copy = deepcopy(model).cpu().eval().requires_grad_(False)
    example, axes = example_input(card, dynamic, False, size, region_graphs.EXAMPLE_SIZE)
    metadata = describe_export(model, card, example, axes, dtype, False)
    with torch.no_grad():
        features = ProposalGraph(copy)(example)[-len(region_graphs.FEATURES) :]
    inputs, names = region_graphs.example_regions(features, axes)
    compute = torch.float16 if dtype == torch.float16 else torch.float32
    if compute == torch.float16:
        cast_weights(copy, compute)
    parts: dict[str, RegionGraph | MaskGraph] = {"regions": RegionGraph(copy, compute)}
    if copy.region_stages[0].has_mask():
        parts["masks"] = MaskGraph(copy, compute)
    contents, metadata["graphs"] = {}, {}
    for name, part in parts.items():
        file, part_axes = path.with_suffix(f".{name}.onnx"), {key: names[key] for key in part.inputs}
        program = trace(part, {key: inputs[key] for key in part.inputs}, part_axes)
        described = {"part": name, "of": path.name} | {key: metadata[key] for key in ("version", "torch", "dtype")}
        contents[file] = onnx_bytes(program, described, part_axes, part.outputs)
        metadata["graphs"][name] = {"file": file.name, "sha256": hashlib.sha256(contents[file]).hexdigest()}
    graph = ProposalGraph(copy, compute)
    metadata["outputs"] = list(graph.outputs)
    program = trace(graph, {"images": example}, {"images": axes})
    contents[path] = onnx_bytes(program, metadata, {"images": axes}, graph.outputs)
    for file, content in contents.items():
        write_file(file, content)
    return Export(path, sum(map(len, contents.values())), metadata)


# The graph: preprocessing, cast, model, float32 outputs.


class ExportGraph(nn.Module):
    """A model with tensors in and float32 tensors out."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, preprocess: nn.Module | None = None):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.preprocess = preprocess

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.preprocess is not None:
            images = self.preprocess(images)
        outputs = self.model(images.to(self.dtype))
        if isinstance(outputs, Tensor):
            return outputs.float()
        return tuple(output.float() if output.is_floating_point() else output for output in outputs)


class DetectorGraph(nn.Module):
    """A sparse detector on normalised images (B, 3, H, W), with the padding and decoding of `SparseDetector`.

    Returns boxes (B, P, 4) in pixels of the input, labels (B, P) and scores (B, P), in the order of the tokens.
    """

    def __init__(self, detector: SparseDetector):
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.head
        self.multiple = int(detector.transform.size_divisible)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, _, height, width = images.shape
        rows = (height + self.multiple - 1) // self.multiple * self.multiple
        columns = (width + self.multiple - 1) // self.multiple * self.multiple
        padded = F.pad(images, (0, columns - width, 0, rows - height))
        size = _stack_sizes(width, height)
        extent = (size / _stack_sizes(columns, rows)).expand(batch, 2)
        tokens, regions, _ = self.backbone.forward_tokens(padded, None, extent)
        logits, boxes = self.head(tokens, regions / extent.repeat(1, 2).unsqueeze(1))
        scores, labels = logits.softmax(-1)[..., 1:].max(-1)
        return boxes.clamp(0, 1) * size.repeat(2), labels + 1, scores


class NormalizeImages(nn.Module):
    """uint8 images (B, 3, H, W) or clips (B, 3, T, H, W) -> normalised float32."""

    mean: Tensor
    std: Tensor

    def __init__(self, preprocess: Preprocess):
        super().__init__()
        shape = (-1, 1, 1, 1) if preprocess.frames else (-1, 1, 1)
        self.register_buffer("mean", torch.tensor(preprocess.mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(preprocess.std).view(shape), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.std


class ResizeAndCrop(nn.Module):
    """uint8 images (..., H, W) -> (..., S, S): shorter side to `shorter`, centre crop, as Pillow computes it.

    Two matrix products, columns first, each rounded to 8 bits. Coordinates are integer arithmetic and exact; Pillow
    rounds its weights to 22 bits, so that a value in a thousand differs by one level.
    """

    def __init__(self, size: int, shorter: int, interpolation: str):
        super().__init__()
        self.size = size
        self.shorter = shorter
        self.interpolation = interpolation

    def forward(self, images: Tensor) -> Tensor:
        height, width = _number(images.shape[-2]), _number(images.shape[-1])
        side = torch.minimum(height, width)
        columns = self.weights(width, self.shorter * width // side, images.shape[-1])  # (S, W)
        rows = self.weights(height, self.shorter * height // side, images.shape[-2])  # (S, H)
        pixels = (images.float() @ columns.t() + 0.5).floor().clamp(0, 255)  # half up, as in Pillow
        return (rows @ pixels + 0.5).floor().clamp(0, 255)

    def weights(self, length: Tensor, resized: Tensor, count: int) -> Tensor:
        """(S, count): contributions of `count` = `length` pixels to the central S of `resized` pixels."""
        first = ((resized - self.size).float() / 2).round().long()  # to even, like Python's round
        index = torch.arange(self.size, device=length.device) + first
        numerator, denominator = (2 * index + 1) * length, 2 * resized
        cell = numerator // denominator  # centre = cell + remainder / denominator, in input pixels
        remainder = (numerator - cell * denominator).float() / denominator.float()
        distance = (torch.arange(count, device=length.device) - cell[:, None]).float() + 0.5 - remainder[:, None]
        stretch = (length.float() / resized.float()).clamp(min=1)
        weights = pillow_filter(distance / stretch, self.interpolation)
        return weights / weights.sum(1, keepdim=True)


def pillow_filter(distance: Tensor, interpolation: str) -> Tensor:
    """Pillow's triangle filter, or its cubic filter with a = -0.5."""
    x = distance.abs()
    if interpolation == "bilinear":
        return (1 - x).clamp(min=0)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _number(value: int) -> Tensor:
    """A size as a tensor: arithmetic of tensors is exported, conditions on symbolic sizes are not."""
    return torch.scalar_tensor(value, dtype=torch.int64)


def _stack_sizes(*values: int) -> Tensor:
    return torch.stack([_number(value).float() for value in values])


def make_graph(model: nn.Module, card: Card, dtype: torch.dtype | None, with_preprocessing: bool) -> ExportGraph:
    """The module that is traced: an inference-only copy of the model on the CPU, between its casts."""
    copy = deepcopy(model).cpu().eval().requires_grad_(False)
    if dtype is not None:
        cast_weights(copy, dtype)
    preprocess = preprocess_graph(card) if with_preprocessing else None
    if isinstance(copy, SparseDetector):
        copy = DetectorGraph(copy)
    return ExportGraph(copy, dtype or torch.float32, preprocess).eval()


def preprocess_graph(card: Card) -> nn.Module:
    """The preprocessing of a card as a module, where its output size does not depend on the image."""
    preprocess = card.preprocess
    if card.task == "detection" or (card.task == "segmentation" and card.shorter):
        raise ExportOptionError(
            f"the preprocessing of this model for {card.task} resizes to a size that depends on the image, which a "
            "graph cannot express exactly. Export without with_preprocessing: the metadata describes it."
        )
    if card.task == "segmentation":
        return NormalizeImages(preprocess)
    if preprocess.interpolation not in FILTERS or preprocess.crop_pct > 1:
        raise ExportOptionError(
            f"expected interpolation {' or '.join(FILTERS)} and crop_pct <= 1, got {preprocess.interpolation} and "
            f"{preprocess.crop_pct}. Export without with_preprocessing: the metadata describes it."
        )
    return nn.Sequential(
        ResizeAndCrop(preprocess.size, shorter_side(preprocess), preprocess.interpolation), NormalizeImages(preprocess)
    ).eval()


def shorter_side(preprocess: Preprocess) -> int:
    """The side to which images are resized before the centre crop; timm rounds down, `EvalClip` to the nearest."""
    ratio = preprocess.size / preprocess.crop_pct
    return round(ratio) if preprocess.frames else math.floor(ratio)


# Tracing.


def example_input(
    card: Card,
    dynamic: Sequence[str],
    with_preprocessing: bool,
    size: int | None,
    dynamic_size: tuple[int, int] = EXAMPLE_SIZE,
) -> tuple[Tensor, dict[int, str]]:
    """Images (or clips) to trace with, and the names of their dynamic axes."""
    frames = (card.preprocess.frames,) if card.preprocess.frames else ()
    side = size or card.preprocess.size
    height, width = dynamic_size if "size" in dynamic else (side, side)
    shape = (2 if "batch" in dynamic else 1, 3, *frames, height, width)
    axes = {0: "batch"} if "batch" in dynamic else {}
    if "size" in dynamic:
        axes |= {len(shape) - 2: "height", len(shape) - 1: "width"}
    if with_preprocessing:
        return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)), axes
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)), axes


InputAxes = dict[str, dict[int, str]]  # input -> dynamic axes and their names


def trace(graph: nn.Module, inputs: dict[str, Tensor], axes: InputAxes) -> ExportedProgram:
    """torch.export of the graph; raises `ExportError` if an axis is fixed by it or a custom operator is in it."""
    try:
        with torch.no_grad():
            shapes = tuple(dict.fromkeys(axes[name], Dim.DYNAMIC) for name in inputs)
            program = torch.export.export(graph, tuple(inputs.values()), dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises many types
        raise ExportError(_explain(error, axes, "torch.export")) from error
    if custom := custom_operators(program):
        raise ExportError(f"expected ATen operators only, got {', '.join(custom)} in the exported graph.")
    return program


def custom_operators(program: ExportedProgram) -> list[str]:
    """The operators of saccade in a graph: there are none, as `saccade.ops` runs references under torch.export."""
    return sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("saccade")})


def _explain(error: Exception, axes: InputAxes, exporter: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "Error" in line and "'>:" in line), lines[0] if lines else "no message")
    reason = re.sub(r"^<class '[\w.]+'>: ", "", reason)
    advice = (
        "Export with another --dynamic: height and width may be fixed by this model." if _has_dynamic_size(axes) else ""
    )
    return f"{exporter} cannot export this model: {reason[:200].rstrip('.')}. {advice}".rstrip()


def _has_dynamic_size(axes: InputAxes) -> bool:
    return "height" in axes.get("images", {}).values()


# Files.


def onnx_bytes(program: ExportedProgram, metadata: dict[str, Any], axes: InputAxes, outputs: Sequence[str]) -> bytes:
    """The ONNX file of a traced graph, with named inputs, outputs and axes, and metadata."""
    check_pooling(program, axes)
    add_head_axis(program)
    try:
        exported = torch.onnx.export(
            program, (), input_names=list(axes), output_names=list(outputs), dynamo=True, verbose=False
        )
    except Exception as error:  # the exporter raises many types
        raise ExportError(_explain(error, axes, "torch.onnx.export")) from error
    assert exported is not None
    proto: Any = exported.model_proto
    if domains := {entry.domain for entry in proto.opset_import} - {"", "ai.onnx"}:
        raise ExportError(f"expected ONNX's own operators only, got the domains {', '.join(sorted(domains))}.")
    _name_axes(proto, axes)
    if metadata["dtype"] == "int8":
        quantize_weights(proto)
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(metadata)
    return proto.SerializeToString()


def check_pooling(program: ExportedProgram, axes: InputAxes) -> None:
    """Refuse adaptive pooling to a grid of dynamic height and width: the ONNX exporter would fix its windows."""
    for node in program.graph.nodes:
        if _has_dynamic_size(axes) and "adaptive_" in str(node.target):
            grid = [int(side) for side in node.args[1]]
            if any(side != 1 for side in grid):
                raise ExportOptionError(
                    f"height and width cannot be dynamic in ONNX: this model pools to a grid of {grid[0]} x {grid[-1]}"
                    ", whose windows depend on the size (UperNet). Use --dynamic batch with --size, or --format pt2."
                )


def add_head_axis(program: ExportedProgram) -> None:
    """Give attention over (B, N, D) a head axis, in place: the ONNX exporter (torch 2.15) translates 4D only."""
    graph, sdpa = program.graph, torch.ops.aten.scaled_dot_product_attention.default
    for node in list(graph.nodes):
        if node.target is not sdpa or node.args[0].meta["val"].ndim != 3:
            continue
        with graph.inserting_before(node):
            inputs = [
                graph.call_function(torch.ops.aten.unsqueeze.default, (arg, 1)) if _is_3d(arg) else arg
                for arg in node.args
            ]
            attended = graph.call_function(sdpa, tuple(inputs), dict(node.kwargs))
            if _is_3d(node.kwargs.get("attn_mask")):
                mask = graph.call_function(torch.ops.aten.unsqueeze.default, (node.kwargs["attn_mask"], 1))
                mask.append(attended)
                attended.kwargs = dict(node.kwargs) | {"attn_mask": mask}
            squeezed = graph.call_function(torch.ops.aten.squeeze.dim, (attended, 1))
            squeezed.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(squeezed)
        graph.erase_node(node)
    program.graph_module.recompile()


def _is_3d(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and argument.meta["val"].ndim == 3


def _name_axes(proto: Any, axes: InputAxes) -> None:
    """Replace torch's symbols (s34) by batch, height and width, in every shape of the graph."""
    dims = {value.name: value.type.tensor_type.shape.dim for value in proto.graph.input}
    names = {dims[key][axis].dim_param: name for key, named in axes.items() for axis, name in named.items()}
    if missing := [name for symbol, name in names.items() if not symbol]:
        raise ExportError(f"the exporter fixed {', '.join(missing)}. Export without it in --dynamic.")
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names) or r"(?!)")
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = pattern.sub(lambda match: names[match.group()], dim.dim_param)


def quantize_weights(proto: Any) -> None:
    """Store weights of matrix products and convolutions as int8, one scale per output channel, in place.

    A DequantizeLinear before each consumer makes float32 of them; activations are not rounded. (ONNX Runtime 1.31's
    quantize_dynamic rounds activations too, and stops at the Gemm of a classifier.)
    """
    onnx = require("onnx", "export")
    graph, nodes = proto.graph, []
    axes = {name: axis for node in graph.node for name, axis in _quantized_inputs(node)}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in axes]:
        values, axis = onnx.numpy_helper.to_array(tensor), axes[tensor.name] % len(tensor.dims)
        if values.dtype != np.float32 or values.size < MIN_QUANTIZED:
            continue
        reduced = tuple(i for i in range(values.ndim) if i != axis)
        scale = np.maximum(np.abs(values).max(reduced, keepdims=True) / 127, np.finfo(np.float32).tiny)
        name = tensor.name
        rounded = np.rint(values / scale).astype(np.int8)
        graph.initializer.remove(tensor)
        graph.initializer.append(onnx.numpy_helper.from_array(rounded, f"{name}.int8"))
        graph.initializer.append(onnx.numpy_helper.from_array(scale.reshape(-1).astype(np.float32), f"{name}.scale"))
        inputs = [f"{name}.int8", f"{name}.scale"]
        nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [name], name=f"{name}.dequantize", axis=axis))
    ordered = [*nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(ordered)


def _quantized_inputs(node: Any) -> list[tuple[str, int]]:
    """Inputs of a node that may be int8 weights, with the axis of their output channels."""
    if node.op_type == "MatMul":
        return [(node.input[1], -1)]
    if node.op_type == "Conv" or node.op_type == "Transpose":  # a transposed Linear weight is (out, in)
        return [(node.input[1 if node.op_type == "Conv" else 0], 0)]
    if node.op_type == "Gemm":
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        return [(node.input[1], 0 if transposed else 1)]
    return []


def describe_export(
    model: nn.Module,
    card: Card,
    example: Tensor,
    axes: dict[int, str],
    dtype: torch.dtype | None,
    with_preprocessing: bool,
) -> dict[str, Any]:
    """The metadata in a file: how to prepare images, what outputs mean, which model it is."""
    metadata: dict[str, Any] = card.preprocess._asdict() | {"in_graph": with_preprocessing, "colour": "RGB"}
    if card.task == "classification":
        metadata["shorter"] = shorter_side(card.preprocess)
    elif card.task == "segmentation":
        metadata["shorter"] = card.shorter
    if isinstance(model, DETECTORS):
        transform: Any = model.transform
        metadata |= {"min_size": transform.min_size[-1], "max_size": transform.max_size}
        metadata |= {"mean": list(transform.image_mean), "std": list(transform.image_std)}
    return {
        "version": package_version(),
        "torch": torch.__version__,
        "model": card.name,
        "head": card.head,
        "task": card.task,
        "num_classes": card.num_classes,
        "classes": card.names,
        "multi_label": card.multi_label,
        "kwargs": card.kwargs,
        "head_kwargs": card.head_kwargs,
        "dtype": str(dtype or torch.float32).removeprefix("torch."),
        "input": [axes.get(axis, length) for axis, length in enumerate(example.shape)],
        "outputs": list(OUTPUTS[card.task]),
        "score_thresh": model.score_thresh if isinstance(model, SparseDetector) else None,
        "preprocess": metadata,
    } | ({"selection": describe_selection(model)} if isinstance(model, RegionDetector) else {})


def describe_selection(model: RegionDetector) -> dict[str, Any]:
    """Thresholds and numbers of proposals and objects, by their names in `create_detector`."""
    rpn, stage = cast(Any, model.rpn), model.region_stages[-1]
    return {
        "rpn_pre_nms_top_n": rpn._pre_nms_top_n["testing"],
        "rpn_post_nms_top_n": rpn._post_nms_top_n["testing"],
        "rpn_nms_thresh": rpn.nms_thresh,
        "rpn_score_thresh": rpn.score_thresh,
        "box_score_thresh": stage.score_thresh,
        "box_nms_thresh": stage.nms_thresh,
        "box_detections_per_img": stage.detections_per_img,
    }
