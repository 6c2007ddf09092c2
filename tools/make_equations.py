"""Find the line that computes every numbered equation of the papers, and write docs/equations.md.

python tools/make_equations.py           # write
python tools/make_equations.py --check   # fail if the page is out of date

The page names functions, so that it changes only when an equation moves to another function. The documentation site
adds the line numbers when it is built (docs/_ext/source_pages.py).
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "saccade"
PAGE = ROOT / "docs" / "equations.md"
PAPERS = {  # prefix of citations: title, page
    "VT": ("VT: visual tokens in a ResNet", "vt.md"),
    "SViT": ("SViT: super token sampling", "svit.md"),
    "PaCa": ("PaCa-ViT: patch-to-cluster attention", "paca.md"),
    "SparseFormer": ("SparseFormer: regions that sample points", "sparseformer.md"),
}
# Equation: the function that computes it, and what it computes. Other lines may cite it too.
EQUATIONS = {
    "PaCa Eq. 1": ("ops/attention.py: cross_attention_reference", "pixels attend to the clusters"),
    "PaCa Eq. 2": ("tokens/clusters.py: ClusterTokenizer.forward", "clusters: pixels pooled with the assignment"),
    "PaCa Eq. 3": ("tokens/clusters.py: ClusterTokenizer.forward", "assignment: softmax of the scores over pixels"),
    "PaCa Eq. 4": ("tokens/clusters.py: ConvClustering.forward", "hidden features of the clustering by convolutions"),
    "PaCa Eq. 5": ("tokens/clusters.py: ConvClustering.forward", "scores of the clustering by convolutions"),
    "PaCa Eq. 6": ("tokens/clusters.py: MlpClustering.forward", "scores of the clustering by an MLP"),
    "SViT Eq. 1": ("models/svit.py: SViTBlock.forward", "position encoding by a depth-wise convolution"),
    "SViT Eq. 2": ("models/svit.py: SViTBlock.forward", "super token attention with its residual"),
    "SViT Eq. 3": ("models/svit.py: SViTBlock.forward", "convolutional feed-forward with its residual"),
    "SViT Eq. 4": ("tokens/super_tokens.py: DenseSuperTokenizer.associate", "association by distance (SSN)"),
    "SViT Eq. 5": ("tokens/super_tokens.py: associate", "association of a pixel with nine super tokens"),
    "SViT Eq. 6": ("tokens/super_tokens.py: gather", "super tokens: means weighted by the association"),
    "SViT Eq. 7": ("benchmark/formulas.py: dense_sampling", "cost of associating all pixels with all tokens"),
    "SViT Eq. 8": ("benchmark/formulas.py: super_token_sampling", "cost of associating nine tokens per pixel"),
    "SViT Eq. 9": ("models/svit.py: SuperTokenAttention.forward", "attention between super tokens"),
    "SViT Eq. 10": ("models/svit.py: SuperTokenAttention.forward", "weights of that attention"),
    "SViT Eq. 11": ("tokens/super_tokens.py: spread", "super tokens put back onto the pixels"),
    "SViT Eq. 13": ("benchmark/formulas.py: global_attention", "cost of global attention"),
    "SViT Eq. 18": ("benchmark/formulas.py: super_token_attention", "cost of super token attention"),
    "SparseFormer Eq. 2": ("tokens/regions.py: PointPlacer.forward", "offsets of the points of a token"),
    "SparseFormer Eq. 3": ("ops/roi_sampling.py: spread_points", "points in the region of a token"),
    "SparseFormer Eq. 4": ("tokens/regions.py: AdaptiveDecoder.forward", "channel and point matrix of a token"),
    "SparseFormer Eq. 5": ("ops/roi_sampling.py: sample_and_mix_reference", "sampled features mixed over channels"),
    "SparseFormer Eq. 6": ("ops/roi_sampling.py: sample_and_mix_reference", "sampled features mixed over points"),
    "SparseFormer Eq. 7": ("layers/boxes.py: adjust", "new centre of a region"),
    "SparseFormer Eq. 8": ("layers/boxes.py: adjust", "new size of a region"),
    "SparseFormer Eq. 9": ("tokens/regions.py: RegionAdjuster.forward", "shift and growth of a region, from its token"),
    "VT Eq. 1": ("tokens/visual_tokens.py: FilterTokenizer.forward", "tokens pooled by learned filters"),
    "VT Eq. 2": ("ops/attention.py: pixel_pooling_attention_reference", "tokens pooled by the previous tokens"),
    "VT Eq. 3": ("layers/relation.py: EquationTransformer.forward", "attention between tokens"),
    "VT Eq. 4": ("layers/relation.py: EquationTransformer.forward", "feed-forward of the tokens"),
    "VT Eq. 5": ("ops/attention.py: cross_attention_reference", "projector: pixels attend to the tokens"),
    "VT Eq. 6": ("tokens/visual_tokens.py: KMeansTokenizer.forward", "tokens pooled around k-means centroids"),
}
CITATION = re.compile(r"\b(?:PaCa|SViT|SparseFormer|VT) Eq\. \d+")


class Place(NamedTuple):
    """A line of code with an equation in its comment, or in one directly above."""

    file: str  # inside the package
    function: str  # "kernel" for Triton kernels, "module" outside functions
    line: int

    @property
    def name(self) -> str:
        return f"{self.file}: {self.function}"


@cache
def find_places() -> dict[str, list[Place]]:
    """Equation -> every place that cites it; the one of EQUATIONS first."""
    places: dict[str, list[Place]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if not CITATION.search(source):
            continue
        functions = functions_of(ast.parse(source))
        for line, equation in cited(source):
            inside = [function for function in functions if function[0] <= line <= function[1]]
            name = max(inside)[2] if inside else "module"  # the innermost function begins last
            places.setdefault(equation, []).append(Place(path.relative_to(PACKAGE).as_posix(), name, line))
    for equation, cited_at in places.items():
        main = EQUATIONS.get(equation, ("",))[0]
        cited_at.sort(key=lambda place: place.name != main)
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


def page() -> str:
    """The page: one table per paper, with the function that computes each equation and the others that use it."""
    lines = [
        "# Equations",
        "",
        "Where every numbered equation of the papers is computed. Each is cited in a comment on its line, so searching",
        'the package for `VT Eq. 5` finds it as well. "Also in" names modules that call the first function, and other',
        "forms of the same equation. Generated by `python tools/make_equations.py`.",
    ]
    for paper, (title, family_page) in PAPERS.items():
        lines += ["", f"## {title}", "", f"[About this family]({family_page})", ""]
        lines += ["| equation | computes | function | also in |", "|---|---|---|---|"]
        for equation in sorted((name for name in EQUATIONS if name.startswith(f"{paper} ")), key=number_of):
            names = dict.fromkeys((place.file, place.function) for place in find_places()[equation])
            first, *also = [f"`{function}` in [{file}](../saccade/{file})" for file, function in names]
            lines.append(f"| {equation} | {EQUATIONS[equation][1]} | {first} | {', '.join(also)} |")
    return "\n".join(lines) + "\n"


def number_of(equation: str) -> int:
    return int(equation.rpartition(" ")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        if not PAGE.is_file() or PAGE.read_text() != page():
            print(f"{PAGE} is out of date: run python tools/make_equations.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
