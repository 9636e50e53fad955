"""What counts as a line, and that the code stays one that can be read."""

from bench.lines import ROOMS, ROOT, count

SOURCE = '''"""Two lines
of docstring."""
# a comment

def f(x):  # counts: there is code before the comment
    """A docstring."""
    text = """a text that is
    no docstring"""
    return (x +
            len(text))
'''


def test_lines_of_code_are_those_without_docstrings_comments_and_blanks():
    assert count(SOURCE) == (10, 5)
    assert count("") == (0, 0)


def test_every_room_has_its_files():
    assert all(list(ROOT.glob(pattern)) for pattern in ROOMS.values())
    assert {path.name for path in ROOT.glob(ROOMS["scripts"])} == {"train.py", "sample.py", "eval.py"}
