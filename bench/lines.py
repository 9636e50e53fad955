"""Lines of Python by room and file: all of them, and those of code, without docstrings, comments and blank lines.

    python bench/lines.py            # the rooms
    python bench/lines.py --files    # and each file
"""

import argparse
import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"stl": "stl/*.py", "rl": "rl/*.py", "model": "model/*.py", "scripts": "*.py"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def count(source: str) -> tuple[int, int]:
    """(all lines, lines of code) of a Python file's text."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(source.splitlines()), len(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print each file's lines too")
    args = parser.parse_args()
    counts = {room: {path: count(path.read_text()) for path in sorted(ROOT.glob(pattern))}
              for room, pattern in ROOMS.items()}
    print(f"{'':28}{'lines':>7}{'of code':>9}")
    for room, files in counts.items():
        lines, code = map(sum, zip(*files.values(), strict=True))
        print(f"{room:28}{lines:7,}{code:9,}")
        for path, (own, own_code) in files.items() if args.files else ():
            print(f"  {path.name:26}{own:7,}{own_code:9,}")
    everything = [pair for files in counts.values() for pair in files.values()]
    lines, code = map(sum, zip(*everything, strict=True))
    print(f"{'all':28}{lines:7,}{code:9,}")


if __name__ == "__main__":
    main()
