"""Pictures of a task and a path: PNG, SVG, or a GIF in which the robot moves and the formulas turn true.

Left the map, with the path coloured by time, the area that the body sweeps, and times at the waypoints; the body is
drawn where the robot starts, waits and ends. Right the formulas, marked by truth. Colours suit the colour-blind.
Import this module only where a picture is wanted: it is the one in stl/ that needs matplotlib.
"""

from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.patheffects import withStroke
from PIL import Image

from stl.formula import In, Out, decimal, walk
from stl.monitor import Verdict, check
from stl.world import Rect, Task

ENDINGS = (".png", ".svg", ".gif")
INK, SOFT, WALL, BODY, TRUE, FALSE = "#1f2933", "#7b8794", "#616e7c", "#0072b2", "#00735c", "#b8420f"
ROLES = {"visit": "#009e73", "keep out": "#d55e00", "both": "#8a5fbf", "unused": "#9aa5b1"}  # of regions in formulas
TINT = "2a"  # alpha of a region's filling
MARKS = {None: ("○", INK), True: ("✓", TRUE), False: ("✗", FALSE)}
MAP, SIDE, WRAP = 5.6, 4.0, 46  # inches: map, column of formulas; characters of a formula's line
SIDES = [(0.8, 1), (-0.8, 1), (0.8, -1), (-0.8, -1), (0, 1), (0, -1), (1, 0), (-1, 0), (0, 2.2), (0, -2.2)]  # of a dot
FRAMES, FRAME_MS, LAST_MS = 80, 100, 2500  # of a GIF


def draw(task: Task, waypoints: list[list[float]] | None = None, path: str | Path = "out.png") -> None:
    """Draw the map, and with `waypoints` [[t, x, y], ...] the path and its verdict, into a .png, .svg or .gif file.

    A malformed path is not drawn; the reason is written instead. A frame of a GIF marks the formulas that would hold
    if the robot stopped there for good. ValueError for another file ending; OSError if the file cannot be written.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"{path}: a picture's ending must be one of {', '.join(ENDINGS)}, not {ending!r}")
    with rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "stl"}):
        sheet = _Sheet(task, waypoints)
        if ending == ".gif":
            sheet.animate(path)
        else:
            sheet.draw_path()
            options = {"metadata": {"Date": None}} if ending == ".svg" else {"dpi": 160}
            sheet.figure.savefig(path, format=ending[1:], **options)


class _Sheet:
    """A figure with the map on the left and the column of formulas on the right; its methods add the path."""

    def __init__(self, task: Task, waypoints: list[list[float]] | None):
        self.task, self.verdict = task, None if waypoints is None else check(task, waypoints)
        judged = self.verdict is not None and self.verdict.clauses is not None
        self.way = np.array(waypoints if judged else [[0.0, *task.robot.start]], float)  # [n, 3]
        self.end = float(self.way[-1, 0])
        space, blocks = task.workspace, self._blocks()
        ratio = (space.xmax - space.xmin) / (space.ymax - space.ymin)
        wide, high = MAP * min(1, max(ratio, 0.02)), MAP * min(1, max(1 / ratio, 0.02))
        bottoms = np.cumsum([(words.count("\n") + 1) * size * 1.5 / 72 for words, size, *_ in blocks]) + 0.2
        width, height = wide + SIDE + 0.5, max(high + 0.75, bottoms[-1] + 0.6)
        self.figure = Figure((width, height))
        FigureCanvasAgg(self.figure)
        place = [0.2 / width, (height - high - 0.2) / height, wide / width, high / height]
        x, y = (space.xmin, space.xmax), (space.ymin, space.ymax)
        self.board = self.figure.add_axes(place, xlim=x, ylim=y, xticks=[], yticks=[])
        self.side = self.figure.add_axes([1 - SIDE / width, 0, SIDE / width, 1], xlim=(0, SIDE), ylim=(height, 0))
        self.side.axis("off")
        style = {"va": "bottom", "linespacing": 1.3, "parse_math": False}
        self.texts = [self.side.text(0, bottom, words, size=size, color=colour, weight=weight, **style)
                      for bottom, (words, size, colour, weight) in zip(bottoms, blocks, strict=True)]
        self.taken: list[np.ndarray] = []  # boxes on the map that labels should not cover, in pixels
        self._draw_map()
        if self.end > 0:  # the scale of the path's colours
            scale = self.figure.add_axes([place[0], place[1] - 0.2 / height, place[2], 0.09 / height])
            scale.imshow(self._colours(np.linspace(0, self.end, 256))[None], aspect="auto", extent=(0, self.end, 0, 1))
            scale.set(yticks=[], frame_on=False)
            scale.tick_params(labelsize=8, labelcolor=SOFT, color=SOFT, length=2)
            scale.set_xlabel("time, s", fontsize=8, color=SOFT, labelpad=1)

    def _blocks(self) -> list[tuple[str, float, str, str]]:
        """The right column as (words, size, colour, weight): two of the head, one of each formula, then the verdict."""
        task, verdict = self.task, self.verdict or Verdict(False, None, [], "")
        metres = np.hypot(*np.diff(self.way[:, 1:], axis=0).T).sum()
        facts = f"{metres:.1f} m in {self.end:.1f} s, " if verdict.clauses is not None else ""
        facts += f"half-width {decimal(task.robot.half_width)} m, at most {decimal(task.robot.v_max)} m/s\n"
        blocks = [(task.id[:40], 13, INK, "bold"), (facts, 8.5, SOFT, "normal")]
        for formula, holds in zip(task.spec, verdict.clauses or [None] * len(task.spec), strict=True):
            mark, colour = MARKS[holds]
            words = fill(f"{mark}  {formula}", WRAP, max_lines=4, subsequent_indent=" " * 8)
            blocks.append((words, 10, colour, "normal"))
        if self.verdict:
            blocks.append(("\nThe path " + ("is right." if verdict.ok else "fails."), 10, MARKS[verdict.ok][1], "bold"))
        return blocks + [(fill(v.text, WRAP + 10, max_lines=4), 8.5, FALSE, "normal") for v in verdict.violations[:4]]

    def _draw_map(self) -> None:
        """Regions by their role in the formulas, obstacles, names, and the legend."""
        atoms = [node for formula in self.task.formulas for node in walk(formula) if isinstance(node, In | Out)]
        used = set()
        for name, rect in self.task.regions.items():
            kinds = {type(atom) for atom in atoms if atom.region == name}
            role = "both" if len(kinds) > 1 else "visit" if In in kinds else "keep out" if kinds else "unused"
            colour = ROLES[role]
            used.add(role)
            self._box(rect, facecolor=colour + TINT, edgecolor=colour, linewidth=1.2, zorder=1)
            centre = ((rect.xmin + rect.xmax) / 2, (rect.ymin + rect.ymax) / 2)
            self._label(centre, name, 9, [(0, 0), *SIDES], weight="bold")
        for rect in self.task.obstacles.values():
            self._box(rect, facecolor=WALL, edgecolor=WALL, linewidth=0.4, zorder=3)
            self.taken.append(self.board.transData.transform([rect[:2], rect[2:]]).ravel())
        marks = [Patch(fc=colour + TINT, ec=colour, label=role) for role, colour in ROLES.items() if role in used]
        marks.append(Patch(color=WALL, label="obstacle"))
        self.side.legend(handles=marks, loc="lower left", ncols=5, frameon=False, fontsize=8.5, labelcolor=SOFT,
                         handlelength=1, handleheight=1, handletextpad=0.5, columnspacing=1, borderpad=0)

    def _colours(self, times: np.ndarray) -> np.ndarray:
        return colormaps["plasma"](0.8 * times / max(self.end, 1e-9))

    def _box(self, rect: Rect, **style) -> Rectangle:
        return self.board.add_patch(Rectangle(rect[:2], rect.xmax - rect.xmin, rect.ymax - rect.ymin, **style))

    def _label(self, place: tuple, words: str, size: float, sides: list, must: bool = True, weight: str = "normal"):
        """Write `words` on the side of a point of the map where they cover least; unless they must, only if nothing."""
        half, pixels = np.array([0.3 * len(words) + 0.1, 0.55]) * size, self.figure.dpi / 72  # half-size in points
        shifts = np.array(sides) * (half + 4)
        centres = self.board.transData.transform(place) + shifts * pixels
        boxes, taken = np.hstack([centres - half * pixels, centres + half * pixels]), np.reshape(self.taken, (-1, 1, 4))
        cost = ((boxes[:, :2] < taken[..., 2:]) & (taken[..., :2] < boxes[:, 2:])).all(2).sum(0)
        cost += 9 * ((boxes[:, :2] < self.board.bbox.min) | (boxes[:, 2:] > self.board.bbox.max)).any(1)
        best = cost.argmin()
        if must or not cost[best]:
            self.taken += [boxes[best]] * 9  # worse to cover than a point of the path
            style = {"fontsize": size, "weight": weight, "color": INK, "ha": "center", "va": "center", "zorder": 7}
            halo = [withStroke(linewidth=2.5, foreground="white")]
            self.board.annotate(words, place, shifts[best], textcoords="offset points", path_effects=halo, **style)

    def draw_path(self) -> None:
        """The whole path: swept area, line, faulty segments, waypoints with times, bodies at the stops."""
        points = self.way[:, 1:]
        swept = _sweep(points, self.task.robot.half_width)
        self.board.add_patch(PathPatch(swept, color=BODY, alpha=0.1, linewidth=0, zorder=2))
        for violation in self.verdict.violations if self.verdict else []:
            if violation.segment is not None and self.end > 0:
                ends = points[violation.segment : violation.segment + 2]
                self.board.plot(*ends.T, color=FALSE, linewidth=7, alpha=0.5, zorder=3.5, solid_capstyle="round")
        self.board.scatter(*points.T, s=14, color=self._colours(self.way[:, 0]), zorder=5)
        line = self._line(self.end)
        self.taken += [np.tile(xy, 2) for xy in self.board.transData.transform(np.array(line.get_segments())[:, 0])]
        words, stops = {}, set()
        stays = np.split(self.way, np.flatnonzero(np.diff(points, axis=0).any(1)) + 1)  # waypoints of equal position
        for i, stay in enumerate(stays):
            (t, x, y), leave = stay[0], stay[-1, 0]
            name = "start " if i == 0 else "end " if i == len(stays) - 1 else ""
            words.setdefault((x, y), []).append(f"{name}{t:.1f}" + (f"–{leave:.1f}" if leave > t else ""))
            if name or leave > t:
                stops.add((x, y))
                self._body(x, y)
        for place in sorted(words, key=lambda place: place not in stops):
            self._label(place, ", ".join(words[place][:4]), 8, SIDES, must=place in stops)

    def _line(self, until: float) -> LineCollection:
        """The path up to a time, coloured by time."""
        t, x, y = self.way.T
        times = np.union1d(np.linspace(0, self.end, 300), t)
        times = times[times <= until]
        points = np.stack([np.interp(times, t, x), np.interp(times, t, y)], 1)
        pieces = np.stack([points, np.roll(points, -1, 0)], 1)[: max(1, len(points) - 1)]  # [n, 2 ends, 2]
        line = LineCollection(pieces, colors=self._colours(times), linewidths=2.4, capstyle="round", zorder=4)
        return self.board.add_collection(line, autolim=False)

    def _body(self, x: float, y: float) -> Rectangle:
        body = Rect(x, y, x, y).grown(self.task.robot.half_width)
        return self._box(body, facecolor=BODY + "40", edgecolor=BODY, linewidth=1.4, zorder=3.8)

    def animate(self, path: str | Path) -> None:
        """A GIF: trail, body, names, clock and formulas drawn for each moment over a fixed background."""
        canvas, frames = self.figure.canvas, []
        clock = self.side.text(SIDE - 0.25, self.texts[0].get_position()[1], "", size=13, ha="right", va="bottom")
        for text in [clock, *self.board.texts, *self.texts[2:]]:
            text.set_animated(True)
        canvas.draw()
        background = canvas.copy_from_bbox(self.figure.bbox)
        for now in np.linspace(0, self.end, FRAMES if self.end else 1):
            canvas.restore_region(background)
            clock.set_text(f"t = {now:.1f} s")
            for artist in [clock, *self._moment(now)]:
                self.figure.draw_artist(artist)
            frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
        palette = frames[-1].quantize(256, Image.Quantize.FASTOCTREE)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
        pauses = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=pauses, loop=0)

    def _moment(self, now: float) -> list:
        """What a frame shows: trail, body, the names above them, formulas; these count as false only at the end."""
        t, last = self.way[:, 0], now == self.end
        here = [float(np.interp(now, t, column)) for column in self.way.T]
        moving = [self._line(now), self._body(*here[1:])]
        for artist in moving:
            artist.remove()  # from the background
        formulas = self.texts[2 : 2 + len(self.task.spec)]
        truths = check(self.task, [*self.way[t <= now].tolist(), here]).clauses if self.verdict else None
        for text, holds in zip(formulas, truths or [], strict=False):
            mark, colour = MARKS[holds or (False if last else None)]
            text.set(text=mark + text.get_text()[1:], color=colour)
        return moving + list(self.board.texts) + (self.texts[2:] if last else formulas)


def _sweep(points: np.ndarray, r: float) -> Outline:
    """The area that the body covers: one hexagon a segment, all turning the same way, so that they fill as one."""
    shapes = []
    for (x, y), (u, v) in zip(points, np.concatenate([points[1:], points[-1:]]), strict=True):
        a, b = r if u >= x else -r, r if v >= y else -r
        shape = [(x - a, y - b), (x + a, y - b), (u + a, v - b), (u + a, v + b), (u - a, v + b), (x - a, y + b)]
        shapes.append(Outline([*(shape if a * b > 0 else shape[::-1]), (0, 0)], closed=True))
    return Outline.make_compound_path(*shapes)
