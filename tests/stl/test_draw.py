"""Pictures of every kind come out for right, wrong, malformed and absent paths, and the inputs stay as they are."""

import xml.etree.ElementTree as xml

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from stl import draw as draw_module  # noqa: E402
from stl.draw import draw  # noqa: E402
from stl.world import Task  # noqa: E402

TASK = Task.from_json(
    {
        "id": "a $name_ <&",
        "workspace": [0, 0, 10, 8],
        "robot": {"half_width": 0.25, "v_max": 1, "start": [1, 1]},
        "obstacles": {"W1": [4, 0, 4.2, 5]},
        "regions": {"A": [7, 1, 9, 3.25], "D": [0.1, 6, 2, 8], "K_1": [5, 6, 6, 7], "Free": [2, 2, 3, 3]},
        "spec": ["F[0,60] in(A)", "G[0,30] out(D)", "F[0,60] (in(K_1) & F[0,9] out(K_1))" + " | in(A)" * 60],
    }
)
GOOD = [[0, 1, 1], [1, 1, 1], [10, 3.5, 6], [14, 5.5, 6.5], [16, 5.5, 6.5], [24, 8, 2]]
PATHS = {
    "right": GOOD,
    "collision": [[0, 1, 1], [9, 8, 2]],
    "too fast": [[0, 1, 1], [0, 8, 2]],
    "waits only": [[0, 1, 1], [5, 1, 1]],
    "start only": [[0, 1, 1]],
    "malformed": [[0, 2, 2]],
    "far away": [[0, 1, 1], [1e9, 1e9, -1e9]],
    "absent": None,
}


@pytest.mark.parametrize("kind", PATHS)
def test_png_and_svg(kind, tmp_path):
    for name in ("p.png", "p.svg"):
        draw(TASK, PATHS[kind], tmp_path / name)
    image = Image.open(tmp_path / "p.png")
    assert image.format == "PNG" and min(image.size) > 500
    assert np.asarray(image.convert("L")).std() > 10  # something is drawn
    assert xml.parse(tmp_path / "p.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("kind", ["malformed", "absent"])
def test_gif_without_a_path_is_still(kind, tmp_path):
    draw(TASK, PATHS[kind], str(tmp_path / "p.GIF"))
    image = Image.open(tmp_path / "p.GIF")
    assert image.format == "GIF" and getattr(image, "n_frames", 1) == 1


def test_gif_moves_and_formulas_turn_true(tmp_path, monkeypatch):
    monkeypatch.setattr(draw_module, "FRAMES", 25)
    draw(TASK, GOOD, tmp_path / "p.gif")
    image = Image.open(tmp_path / "p.gif")
    assert image.info["loop"] == 0 and image.n_frames > 20
    frames = []
    for index in (0, image.n_frames - 1):
        image.seek(index)
        frames.append(np.asarray(image.convert("RGB"), int))
    changed = np.abs(frames[0] - frames[1]).sum(2).any(0)  # columns of pixels
    assert changed[: len(changed) // 2].any() and changed[-300:].any()  # on the map, and among the formulas
    sheet = draw_module._Sheet(TASK, GOOD)  # which ends on the name of A: that is still to be read
    box, dark = sheet.board.texts[0].get_window_extent(), [frame.sum(2)[::-1] < 200 for frame in frames]
    before, after = (one[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)] for one in dark)
    assert before.any() and after[before].all()


def test_same_picture_twice_and_the_path_is_left_alone(tmp_path):
    path = [list(point) for point in GOOD]
    for name in ("a.svg", "b.svg"):
        draw(TASK, path, tmp_path / name)
    assert path == GOOD
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_odd_shapes(tmp_path):
    base = TASK.to_json() | {"obstacles": {}, "regions": {}, "spec": []}
    for space in ([0, 0, 100, 1], [0, 0, 1, 100], [-1e5, -1e5, 1e5, 1e5]):
        draw(Task.from_json(base | {"workspace": space}), [[0, 1, 1], [1, 1, 2]], tmp_path / "p.png")
    many = Task.from_json(TASK.to_json() | {"spec": ["F[0,9] in(A)"] * 100})
    draw(many, GOOD, tmp_path / "p.png")


@pytest.mark.parametrize("name", ["p.jpg", "p", "png", "p.png.pdf"])
def test_another_ending_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.gif"):
        draw(TASK, GOOD, tmp_path / name)
