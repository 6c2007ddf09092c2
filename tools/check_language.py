"""Check that code and documentation use the field's vocabulary (CONTRIBUTING, "Language").

    python tools/check_language.py                      # the whole repository
    python tools/check_language.py saccade/web docs     # some paths
    python tools/check_language.py --json

Checks names defined in Python files (split at `_` and camel case; file names too), docstrings, comments, text in string
literals of the package, Markdown, and comments in YAML and shell files. Skips code spans, quoted text and paths.
Exceptions are in tools/language_allowlist.txt: `glob | text of the line | reason`, at most 25. Exit code: 0 clean,
1 findings.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ALLOWLIST = Path(__file__).with_name("language_allowlist.txt")
MAX_ALLOWED = 25
SCOPE = ("saccade", "tests", "benchmarks", "tools", "examples", "docs", "recipes")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
UNITS = (
    "batch|block|call|case|cell|channel|class|column|epoch|file|frame|group|head|image|index|key|launch|layer|line|model|norm"
    "|pixel|point|program|query|region|request|round|row|sample|second|shape|slice|stage|step|string|task|tensor|test|thread"
    "|token|turn|value|variant|view"
)


class Rule(NamedTuple):
    """One row of the vocabulary: what to write, and patterns of what not to write."""

    write: str
    names: str = ""  # regex over the parts of a name joined by "_", in lower case; `<` and `>` are part boundaries
    prose: str = ""  # regex over text, in lower case


RULES = {
    "twin": Rule("reference (implementation), *_reference", "<twins?>", r"\btwins?\b"),
    "way back": Rule(
        "backward (pass); forward and backward",
        "<way_back>|<there_and_back>|<way_there>",
        r"\bway (back|there)\b|\bthere and back\b|\bgo(es|ing)? back\b",
    ),
    "learns": Rule(
        "training, trainable, requires_grad", "<learns>|^learning$|<learners?>", r"\blearns\b|\bthat learn\b"
    ),
    "answer": Rule("output, prediction, logits; inference-only", "<answer(s|ed|ing)?>", r"\banswer(s|ed|ing)?\b"),
    "heard": Rule(
        "has hooks, has_hooks", "<heard>|<hears?>|<listen(s|ed|ing|er)?>", r"\bheard\b|\bhears?\b|\blisten(s|ed|ing)?\b"
    ),
    "nobody": Rule("name the subject", "<(no|some)body>", r"\b(no|some)body\b|\bsomeone\b"),
    "ask": Rule("attend, query", "<ask(s|ed|ing)?>", r"\basks?\b|\basking\b"),
    "look": Rule(
        "sample, forward, preprocess, explain",
        "<look(s|ed|ing)?>(?!_(up|ahead))",
        r"\blook(s|ed|ing)?\b(?! up\b| like\b)",
    ),
    "road": Rule(
        "path, fast path", "<roads?>", r"\b(short|fast|slow|own|same|plain|two|this|that|other|\w+'s) roads?\b"
    ),
    "kept": Rule("cached; saved for backward", "<kept>|<in_form>|<never_change>", r"\bkept\b|\bin form\b"),
    "forget": Rule("recompute in backward", "<forg(et|ets|ot|otten|etting)>", r"\bforg(et|ets|ot|otten|etting)\b"),
    "held": Rule("mask, valid, registered", "<held>(?!_out)|^known$", r"\bheld\b(?![- ]out\b)"),
    "recorded": Rule("captured; CUDA graph", "<recorded>|<recordings?>", r"\brecorded\b|\brecordings?\b"),
    "the library": Rule("PyTorch, cuDNN, cuBLAS, the authors' code", "", r"\bthe library\b|\bthe library's\b"),
    "compilers": Rule("torch.compile, Inductor, Dynamo", "<compilers?>", r"\bcompilers?\b"),
    "picture": Rule("image; figure for what we draw", "<pictures?>", r"\bpictures?\b"),
    "dice": Rule(
        "rng, generator, sample",
        "<dice>(?!_(loss|score))|<thrown?>|<throws>",
        r"\bdice\b(?! (loss|score))|\bthrow[ns]?\b",
    ),
    "figures": Rule(
        "metrics, numbers", "", r"\b(papers?'s?|papers|printed|measured|published|reported|best|final|own) figures?\b"
    ),
    "stands": Rule("follows, precedes, after", "<stands>|<behind>", r"\bstands?\b|\bbehind\b|\bin front of\b"),
    "suits": Rule("supports, can_use_*, is_supported", "<suits?>|^fits_|^takes_|^fits$", r"\bsuits\b"),
    "fresh": Rule("randomly initialised; new", "<fresh>", r"\bfresh\b"),
    "halved": Rule(
        "half-precision dtypes; cast to the autocast dtype", "<halved>|<halves>", r"\bin halves\b|\bhalved\b"
    ),
    "whole": Rule("fused; batched; opaque op", "^whole$|<at_once>|^together$", r"\bat once\b|\bwhole or not at all\b"),
    "shares": Rule("probabilities, weights, fraction", "<shares>|^share$", r"\bshares of\b|\btheir shares?\b"),
    "by turns": Rule("interleaved", "<by_turns>", r"\bby turns\b|\btakes? turns\b|\ba turn\b"),
    "trunk": Rule("backbone", "<trunks?>", r"\btrunks?\b|\bbody of (a|the) (net|network|model|backbone)\b"),
    "update": Rule(
        "optimizer step; checkpoint",
        "",
        r"\b(\d+|each|every|per|first|last|next|an|at|many|of) updates?\b|\bthe state is saved\b",
    ),
    "worth": Rule("metric", "<worth>", r"\bworth\b"),
    "opinion": Rule("auxiliary output", "<opinions?>", r"\bopinions?\b"),
    "owes": Rule("pending", "<ow(es|ed|ing)>", r"\bow(es|ed)\b"),
    "mend": Rule("fix", "<mend(s|ed|ing)?>", r"\bmend(s|ed|ing)?\b"),
    "dearer": Rule("costlier", "<dearer>", r"\bdearer\b"),
    "ghost": Rule("copy", "<ghosts?>", r"\bghosts?\b"),
    "crank": Rule("loop", "<cranks?>", r"\bcranks?\b"),
    "house": Rule("package", "<houses?>|<rooms?>", r"\bhouses?\b|\brooms?\b"),
    "door": Rule("endpoint, function", "<doors?>", r"\bdoors?\b"),
    "vague name": Rule("name the thing", "^(there|here|away|about|rest|others|seen|found|made|numbers)$"),
    "a for per": Rule(
        "per: one token per cell, images per second",
        "",
        rf"\b(images|clips|samples|requests|operations|additions|tokens|frames) an? second\b"
        rf"|\b(ms|µs|milliseconds|microseconds|bytes|kb|mb|launches|passes)"
        rf" an? ({UNITS})\b|\b(instructions|times|once|twice|few|many) an? ({UNITS})\b"
        rf"|\bone \w+ an? ({UNITS})\b",
    ),
}


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    kind: str  # "name", "prose"
    text: str  # what was matched
    write: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind} {self.text!r} ({self.rule}): write {self.write}"


class Allowed(NamedTuple):
    glob: str
    text: str
    reason: str


def split_name(name: str) -> str:
    """Return the parts of a name, in lower case and joined by "_": "lookAt", "LookAt", "look_at" -> "look_at"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub("_+", "_", words).strip("_").lower()


def compile_names(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("<", r"(?:^|(?<=_))").replace(">", r"(?=_|$)"))


NAME_RULES = {rule: compile_names(row.names) for rule, row in RULES.items() if row.names}
PROSE_RULES = {rule: re.compile(row.prose, re.IGNORECASE) for rule, row in RULES.items() if row.prose}


def check_name(name: str) -> list[tuple[str, str]]:
    """Return (rule, name) of every rule that a name breaks."""
    parts = split_name(name)
    return [(rule, name) for rule, pattern in NAME_RULES.items() if pattern.search(parts)]


def check_prose(text: str) -> list[tuple[str, str]]:
    """Return (rule, match) of every rule that a line of text breaks, outside code spans, quotes, links and paths."""
    text = re.sub(r"``.+?``|`[^`]*`", " ", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"(?<![\w'])'[^'\n]+'(?!\w)|\"[^\"\n]*\"|“[^”]*”", " ", text)
    text = re.sub(r"\S*(?:[/_\\]|\.\w)\S*", " ", text)
    return [(rule, match.group()) for rule, pattern in PROSE_RULES.items() for match in pattern.finditer(text)]


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every name that a module defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the first lines of docstrings and other string statements."""
    return {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def prose_of_python(source: str, tree: ast.AST, literals: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments, docstrings and, with `literals`, of string literals that contain a space."""
    docstrings = docstring_lines(tree)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, kind = token.start[0], tokenize.tok_name[token.type]
        if kind == "COMMENT" and not re.match(r"#\s*(type:|noqa|fmt:|pyright:)", token.string):
            yield row, token.string
        elif kind == "STRING":
            text = re.sub(r"^[a-zA-Z]*('''|\"\"\"|'|\")|('''|\"\"\"|'|\")$", "", token.string)
            if row not in docstrings:
                text = re.sub(r"\{[^{}]*\}", "", text)  # expressions of f-strings before Python 3.12
            if row in docstrings or (literals and " " in text):
                yield from ((row + i, line) for i, line in enumerate(text.split("\n")))
        elif kind == "FSTRING_MIDDLE" and literals and " " in token.string:
            yield row, token.string


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "Classes: ")):  # indented code; class names of model cards
            yield number, line


def prose_of_yaml(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line:
            yield number, line.partition("#")[2]


def check_file(path: Path, root: Path = ROOT) -> list[Finding]:
    """Check one Python, Markdown, YAML or shell file."""
    relative = path.relative_to(root)
    text = path.read_text()
    hits: list[tuple[int, str, str, str]] = []
    if path.suffix == ".py":
        tree = ast.parse(text)
        names = [(1, part) for part in relative.with_suffix("").parts[-1:]] + list(defined_names(tree))
        hits += [(line, rule, "name", match) for line, name in names for rule, match in check_name(name)]
        prose = prose_of_python(text, tree, literals=relative.parts[0] == "saccade")
    elif path.suffix == ".md":
        prose = prose_of_markdown(text)
    else:
        prose = prose_of_yaml(text)
    hits += [(line, rule, "prose", match) for line, words in prose for rule, match in check_prose(words)]
    return [
        Finding(relative.as_posix(), line, rule, kind, match, RULES[rule].write) for line, rule, kind, match in hits
    ]


def find_files(paths: list[Path]) -> list[Path]:
    """Return the checked files under some paths, sorted."""
    files: set[Path] = set()
    for path in paths:
        files |= {path} if path.is_file() else set(path.rglob("*"))
    suffixes = (".py", ".md", ".yaml", ".yml", ".sh")
    generated = {"__pycache__", "_build"}  # docs/examples: sphinx-gallery's copies of docs/gallery
    files = {path for path in files if not generated & set(path.parts) and "docs/examples/" not in path.as_posix()}
    return sorted(path for path in files if path.suffix in suffixes)


def read_allowlist(path: Path = ALLOWLIST) -> list[Allowed]:
    rows = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    allowed = [Allowed(*(part.strip() for part in row.split(" | "))) for row in rows]
    if len(allowed) > MAX_ALLOWED:
        raise ValueError(f"expected at most {MAX_ALLOWED} lines in {path.name}, got {len(allowed)}. Rewrite the text.")
    return allowed


def check(files: list[Path], allowed: list[Allowed], root: Path = ROOT) -> tuple[list[Finding], list[Allowed]]:
    """Return the findings that are not allowed, and the entries of the allow-list that match no finding."""
    findings, used = [], set()
    for path in files:
        lines = path.read_text().splitlines()
        for finding in check_file(path, root):
            line = lines[finding.line - 1] if finding.line <= len(lines) else ""
            match = next((a for a in allowed if fnmatch(finding.path, a.glob) and a.text in line), None)
            used.add(match)
            if match is None:
                findings.append(finding)
    return findings, [entry for entry in allowed if entry not in used]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders (default: the repository)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--counts", action="store_true", help="print the number of findings per package, not the findings"
    )
    args = parser.parse_args(argv)
    files = find_files([path.resolve() for path in args.paths] or [ROOT / name for name in (*SCOPE, *PAGES)])
    try:
        findings, unused = check(files, read_allowlist())
    except (OSError, ValueError, SyntaxError) as error:
        print(f"check_language: {error}", file=sys.stderr)
        return 1
    unused = [] if args.paths else unused
    packages = Counter("/".join(finding.path.split("/")[:2]) for finding in findings)
    if args.json:
        document = {"findings": [asdict(finding) for finding in findings], "counts": dict(packages), "unused": unused}
        print(json.dumps(document, indent=2))
    elif args.counts:
        print(*(f"{count:5d} {package}" for package, count in packages.most_common()), sep="\n")
    else:
        print(
            *findings, *(f"unused entry of the allow-list: {' | '.join(entry)}" for entry in unused), sep="\n", end=""
        )
        print(
            f"\n{len(findings)} findings in {len(files)} files" if findings or unused else f"{len(files)} files checked"
        )
    return 1 if findings or unused else 0


if __name__ == "__main__":
    sys.exit(main())
