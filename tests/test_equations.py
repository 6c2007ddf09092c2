"""Every numbered equation of the papers is found by searching for its name, in plain PyTorch."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "saccade"
# Equation -> a function that computes it. Others may cite it too.
COMPUTED_BY = {
    "PaCa Eq. 1": "ops/attention.py: cross_attention_reference",
    "PaCa Eq. 2": "ops/pixel_pooling.py: pool_pixels",
    "PaCa Eq. 3": "ops/pixel_pooling.py: pixel_softmax_reference",
    "PaCa Eq. 4": "tokens/clusters.py: ConvClustering.forward",
    "PaCa Eq. 5": "tokens/clusters.py: ConvClustering.forward",
    "PaCa Eq. 6": "tokens/clusters.py: MlpClustering.forward",
    "SViT Eq. 1": "models/svit.py: SViTBlock.forward",
    "SViT Eq. 2": "models/svit.py: SViTBlock.forward",
    "SViT Eq. 3": "models/svit.py: SViTBlock.forward",
    "SViT Eq. 4": "tokens/super_tokens.py: DenseSuperTokenizer.associate",
    "SViT Eq. 5": "tokens/super_tokens.py: associate",
    "SViT Eq. 6": "tokens/super_tokens.py: gather",
    "SViT Eq. 7": "benchmark/formulas.py: dense_sampling",
    "SViT Eq. 8": "benchmark/formulas.py: super_token_sampling",
    "SViT Eq. 13": "benchmark/formulas.py: global_attention",
    "SViT Eq. 18": "benchmark/formulas.py: super_token_attention",
    "SViT Eq. 9": "models/svit.py: SuperTokenAttention.forward",
    "SViT Eq. 10": "models/svit.py: SuperTokenAttention.forward",
    "SViT Eq. 11": "tokens/super_tokens.py: spread",
    "SparseFormer Eq. 2": "tokens/regions.py: PointPlacer.forward",
    "SparseFormer Eq. 3": "ops/roi_sampling.py: spread_points",
    "SparseFormer Eq. 4": "tokens/regions.py: AdaptiveDecoder.forward",
    "SparseFormer Eq. 5": "ops/roi_sampling.py: sample_and_mix_reference",
    "SparseFormer Eq. 6": "ops/roi_sampling.py: sample_and_mix_reference",
    "SparseFormer Eq. 7": "layers/boxes.py: adjust",
    "SparseFormer Eq. 8": "layers/boxes.py: adjust",
    "SparseFormer Eq. 9": "tokens/regions.py: RegionAdjuster.forward",
    "VT Eq. 1": "tokens/visual_tokens.py: FilterTokenizer.forward",
    "VT Eq. 2": "ops/attention.py: pixel_pooling_attention_reference",
    "VT Eq. 3": "layers/relation.py: EquationTransformer.forward",
    "VT Eq. 4": "layers/relation.py: EquationTransformer.forward",
    "VT Eq. 5": "ops/attention.py: cross_attention_reference",
    "VT Eq. 6": "tokens/visual_tokens.py: KMeansTokenizer.forward",
}
CITATION = re.compile(r"\b(?:PaCa|SViT|SparseFormer|VT) Eq\. \d+")


@cache
def commented_code() -> dict[str, set[str]]:
    """Equation -> "file: function" of every line of code with the equation in its comment, or in one directly above."""
    places: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if not CITATION.search(source):
            continue
        functions = functions_of(ast.parse(source))
        for line, equation in cited(source):
            inside = [function for function in functions if function[0] <= line <= function[1]]
            name = max(inside)[2] if inside else "module"  # the innermost function begins last
            places.setdefault(equation, set()).add(f"{path.relative_to(PACKAGE)}: {name}")
    return places


def cited(source: str) -> list[tuple[int, str]]:
    """(line of code, equation) of every citation in a comment."""
    lines = source.splitlines()
    citations = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            while lines[line - 1].lstrip().startswith("#"):  # a comment of its own: the code is below
                line += 1
            citations += [(line, equation) for equation in CITATION.findall(token.string) if lines[line - 1].strip()]
    return citations


def functions_of(tree: ast.Module) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of every function and method; kernels are named "kernel"."""
    functions = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                is_kernel = any(ast.unparse(decorator) in ("jit", "triton.jit") for decorator in child.decorator_list)
                name = "kernel" if is_kernel else prefix + child.name
                functions.append((child.lineno, child.end_lineno or child.lineno, name))
            visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    visit(tree, "")
    return functions


@pytest.mark.parametrize("equation", COMPUTED_BY)
def test_equation_is_found_where_it_is_computed(equation):
    places = commented_code().get(equation, set())
    assert COMPUTED_BY[equation] in places, places
    assert not any(place.endswith(": kernel") for place in places), places


def test_every_cited_equation_is_in_the_table():
    assert set(commented_code()) == set(COMPUTED_BY)
