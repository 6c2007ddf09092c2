"""Write the table of operations into docs/dev/operations.md from `saccade.ops.REGISTRY`.

python tools/make_operations.py           # write
python tools/make_operations.py --check   # fail if the page is out of date
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import saccade  # noqa: F401  (imports every module that registers operations)
from saccade import ops

PAGE = Path(__file__).parent.parent / "docs" / "dev" / "operations.md"
BEGIN, END = "<!-- operations: begin -->", "<!-- operations: end -->"


def table(registry: dict[str, Any] = ops.REGISTRY) -> str:
    """The operations as a Markdown table, sorted by file and name."""
    rows = ["| operation | file | implementations | reference |", "|---|---|---|---|"]
    for name, op in sorted(registry.items(), key=lambda item: (file_of(item[1]), item[0])):
        path = file_of(op)
        implementations = ", ".join([*(f"`{kind}`" for kind, *_ in op.fused), "`reference`"])
        summary = op.reference.__doc__.partition("\n")[0].replace("|", r"\|")
        rows.append(f"| `{name}` | [{path}](../../saccade/{path}) | {implementations} | {summary} |")
    return "\n".join(rows)


def file_of(op: Any) -> str:
    """Path inside the package of the file with the first fused implementation."""
    _, _, run = op.fused[0]
    return run.__module__.removeprefix("saccade.").replace(".", "/") + ".py"


def with_table(text: str) -> str:
    """The page with today's table between its marks."""
    before, _, after = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{after.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = PAGE.read_text()
    if args.check:
        if with_table(text) != text:
            print(f"{PAGE} is out of date: run python tools/make_operations.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(with_table(text))
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
