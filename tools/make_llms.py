"""Write llms.txt, the map of the documentation for language models (https://llmstxt.org).

python tools/make_llms.py           # write
python tools/make_llms.py --check   # fail if it is out of date

Sections and pages are those of docs/index.md; a page's line is its title with the titles of its sections.
"""

import argparse
import re
import sys
from pathlib import Path

import saccade

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FILE = ROOT / "llms.txt"
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, list[Path]]:
    """Caption -> pages of the table of contents; pages that the build generates are left out."""
    contents: dict[str, list[Path]] = {}
    for toctree in TOCTREE.findall((DOCS / "index.md").read_text()):
        caption = re.search(r"^:caption: (.+)$", toctree, re.MULTILINE)
        assert caption is not None, toctree
        names = [line.strip() for line in toctree.splitlines() if line.strip() and not line.startswith(":")]
        pages = [page for name in names for page in sorted(DOCS.glob(f"{name}.md"))]
        contents[caption[1]] = pages
    return contents


def describe(page: Path) -> str:
    """Link to a page with its title, and the titles of its sections."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    title = text.partition("\n")[0].removeprefix("# ")
    parts = "; ".join(re.findall(r"^## (.+)$", text, re.MULTILINE))
    return f"- [{title}]({page.relative_to(ROOT).as_posix()})" + (f": {parts}" if parts else "")


def render() -> str:
    lines = [
        "# saccade",
        "",
        "> PyTorch library of four families of vision models (VT, SViT, PaCa-ViT, SparseFormer) that group pixels into",
        "> a few tokens: timm models with training, evaluation, prediction, explanation, export and measurement.",
        "",
        f"Public names: {', '.join(f'saccade.{name}' for name in saccade.__all__)}.",
        "Commands: saccade COMMAND --help prints the options of a command and an example.",
    ]
    for caption, pages in sections().items():
        lines += ["", f"## {caption}", ""]
        lines += [describe(page) for page in pages]
        if caption == "Start":
            for script in sorted((DOCS / "gallery").glob("*.py")):
                title = script.read_text().splitlines()[1]
                lines.append(f"- [{title}]({script.relative_to(ROOT).as_posix()}): example script")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        if not FILE.is_file() or FILE.read_text() != render():
            print(f"{FILE} is out of date: run python tools/make_llms.py", file=sys.stderr)
            return 1
        return 0
    FILE.write_text(render())
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
