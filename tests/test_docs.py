"""What the documents say is so: places in the code exist, the tour's numbers are those of its script, links lead on."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def names(path: Path) -> set[str]:
    """Functions, classes, methods and module constants of a file: "f", "C", "C.m", "X"."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)} if (
                isinstance(node, ast.ClassDef)) else set()
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_places_exist(page):
    for file, name in PLACE.findall(page.read_text()):
        assert (ROOT / file).is_file() and name in names(ROOT / file), f"{page.name} names {file}:{name}"


def test_details_say_where_and_what_goes_wrong_otherwise():
    paragraphs = (ROOT / "docs" / "details.md").read_text().split("\n\n")
    details = [text for text in paragraphs if text.startswith("**")]
    assert len(details) > 40
    assert not [text for text in details if not PLACE.search(text) or "*Otherwise" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tour_is_what_its_script_writes(tmp_path):
    subprocess.run([sys.executable, str(ROOT / "docs" / "tour.py"), "--out", str(tmp_path / "tour.md")], check=True)
    told, found = ((folder / "tour.md").read_text() for folder in (ROOT / "docs", tmp_path))
    assert words(told) == words(found)
    for old, new in zip(NUMBER.findall(told), NUMBER.findall(found), strict=True):
        one, other = (float(text.replace(",", "")) for text in (old, new))
        # another machine rounds otherwise; what is counted is the same, and so is each decimal up to a little
        assert one == other if "." not in old else abs(one - other) <= 0.02 + 0.05 * abs(one), (old, new)


def words(text: str) -> str:
    """The text without its numbers, however its lines are broken."""
    return " ".join(NUMBER.sub("#", text).split())


def test_countdown_is_small_and_the_core_does_not_know_it():
    files = list((ROOT / "examples" / "countdown").glob("*.py"))
    assert sum(len(file.read_text().splitlines()) for file in files) <= 150
    core = [file for folder in ("stl", "model", "rl") for file in (ROOT / folder).glob("*.py")]
    for file in [*core, ROOT / "train.py", ROOT / "eval.py", ROOT / "sample.py"]:
        code = ast.parse(file.read_text())
        imports = {getattr(node, "module", None) or "" for node in ast.walk(code) if isinstance(node, ast.ImportFrom)}
        imports |= {name.name for node in ast.walk(code) if isinstance(node, ast.Import) for name in node.names}
        assert not any(name.startswith("examples") for name in imports), file
