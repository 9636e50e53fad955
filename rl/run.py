"""The run folder: what a run writes, so that it can be killed at any time, resumed, compared and reported.

    runs/NAME/config.json versions.json    the settings, and what the run runs on
              metrics.jsonl                one line a step or measurement
              episodes/step-000012.jsonl.gz   the rollouts of a step, one a line, written before its update
              checkpoints/grpo-000012/     a model or adapter folder with state.json and trainer/NAME.safetensors
              lock, finished               held while a process trains; made when the run is complete

Files and folders are written under a temporary name, synced and renamed, so what has its name is complete.
torch is imported only where tensors are read or written.
"""
from __future__ import annotations

import fcntl
import gzip
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from rl.env import STL
from rl.episode import Episode

if TYPE_CHECKING:
    import torch

    from rl.config import Config

STAGES = ("sft", "grpo")
CHECKPOINT = re.compile(r"(sft|grpo)-(\d+)")  # names of folders; whoever keeps a copy adds to the name
HARMLESS = ("about", "price_per_hour", "peak_tflops", "keep_checkpoints", "checkpoint_seconds")  # change no result
FORMER = ("sft_failures",)  # settings that runs of old have, and that are no more
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "vllm", "flash-linear-attention")


class RunError(ValueError):
    """The run folder cannot be used as asked: the message names it and says what would be right."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `state` is what was given to save."""

    stage: str
    step: int
    folder: Path
    state: dict

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "trainer" / f"{name}.safetensors")


class Run:
    """A run folder that this process alone writes to. Made by Run.open."""

    def __init__(self, folder: Path, keep_checkpoints: int):
        self.folder, self.keep, self._metrics = folder, keep_checkpoints, folder / "metrics.jsonl"
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)  # let go when this process ends, however it ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise RunError(f"{folder}: another process is training in it; wait for it, or give --new") from None
        for left in (folder / "checkpoints").glob("tmp-*"):
            shutil.rmtree(left)
        content = self._metrics.read_bytes() if self._metrics.exists() else b""
        if not content.endswith(b"\n"):  # a kill cut the last line
            write_file(self._metrics, content[: content.rfind(b"\n") + 1])

    @classmethod
    def open(cls, config: Config, root: str | Path = "runs", new: bool = False, force: bool = False) -> Run:
        """Resume the newest run of the config's name below `root`, or begin one (always, if `new`).

        RunError: another process holds it, or the settings differ from those it was begun with; `force` takes the new
        ones and reopens a finished run.
        """
        from rl.config import to_json

        folder = run_folder(config, root, new)
        try:
            for name in ("checkpoints", "episodes"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder}: cannot make the run folder: {error.strerror}") from None
        run = cls(folder, config.keep_checkpoints)
        changes = changed_settings(config, folder) if (folder / "config.json").exists() else []
        if changes and not force:
            run.close()
            raise RunError(f"{folder} was begun with other settings: {', '.join(changes)}; give the old ones, or --new "
                           "for a new run, or --force to go on with the new ones")
        run._set_damaged_aside()
        if changes:
            run._forget_later()
        write_json(folder / "config.json", to_json(config))
        write_json(folder / "versions.json", versions())
        return run

    @property
    def finished(self) -> bool:
        return (self.folder / "finished").exists()

    def finish(self) -> None:
        self._prune()
        write_file(self.folder / "finished", b"")

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def log(self, row: dict) -> None:
        """Append `row` to the metrics: "stage" ("sft", "grpo", "eval"), "step", for "eval" the training stage in "of".

        What depends on time stands under row["time"], so that everything else can be compared to the bit.
        """
        with writing(self._metrics), open(self._metrics, "ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def rows(self, stage: str | None = None) -> list[dict]:
        return read_rows(self.folder, stage)

    def rewind(self, stage: str, step: int) -> None:
        """Drop the metrics from the first row after `step` of `stage` on: what a resumed run will do again."""
        rows, now = self.rows(), (STAGES.index(stage), step)
        stages = [row.get("of", row["stage"]) for row in rows]
        later = (i for i, name in enumerate(stages) if name in STAGES and (STAGES.index(name), rows[i]["step"]) > now)
        write_file(self._metrics, b"".join(map(_line, rows[: next(later, len(rows))])))

    def save(self, stage: str, step: int, files: dict[str, dict[str, torch.Tensor]], state: dict,
             fill: Callable[[Path], None] | None = None) -> Checkpoint:
        """Write a checkpoint and drop all of the stage but the last `keep_checkpoints` and the best. `fill` adds files
        of its own. RunError if it cannot be written: those before it are as they were."""
        from model.checkpoint import write_safetensors

        name = f"{stage}-{step:06d}"
        final, temporary = (self.folder / "checkpoints" / (prefix + name) for prefix in ("", "tmp-"))
        with writing(final):
            temporary.mkdir()
            for key, tensors in files.items():  # in a folder of their own: a reader of models takes all beside it
                (temporary / "trainer").mkdir(exist_ok=True)
                write_safetensors(tensors, temporary / "trainer" / f"{key}.safetensors")
            if fill:
                fill(temporary)
            sizes = {str(path.relative_to(temporary)): path.stat().st_size
                     for path in sorted(temporary.glob("**/*")) if path.is_file()}
            write_json(temporary / "state.json", state | {"files": sizes})
            old = final.rename(final.with_name(f"tmp-old-{name}")) if final.exists() else None
            _rename(temporary, final)
            if old:
                shutil.rmtree(old)
        self._prune()
        return Checkpoint(stage, step, final, state)

    def _prune(self) -> None:
        for stage in STAGES:
            for old in _checkpoints(self.folder, stage)[: -self.keep]:
                if old != best_checkpoint(self.folder, stage):
                    _remove(old)

    def _set_damaged_aside(self) -> None:
        """Go on from the checkpoint before, should something else than this program have cut the last one's files."""
        while (last := _newest(self.folder)) and (reason := _damage(last)):
            aside = last.with_name(f"damaged-{last.name}")
            print(f"{last}: cannot be read ({reason}); it is now {aside.name}, and the one before counts", flush=True)
            shutil.rmtree(aside, ignore_errors=True)
            last.rename(aside)
        if last and (base := _newest(self.folder, "sft")) and (reason := _damage(base)):
            raise RunError(f"{base}: cannot be read ({reason}), and what was learnt later needs it; give --new")

    def latest(self, stage: str | None = None) -> Checkpoint | None:
        return latest_checkpoint(self.folder, stage)

    def write_episodes(self, step: int, episodes: list[Episode]) -> None:
        lines = b"".join(_line(episode.to_json()) for episode in episodes)
        write_file(self._episodes(step), gzip.compress(lines, compresslevel=4, mtime=0))

    def read_episodes(self, step: int) -> list[Episode] | None:
        """The rollouts of `step` if they were finished, the same to the bit; else None."""
        path = self._episodes(step)
        return read_episodes(path) if path.exists() else None

    def _episodes(self, step: int) -> Path:
        return self.folder / "episodes" / f"step-{step:06d}.jsonl.gz"

    def _forget_later(self) -> None:
        """The settings change: the run is not finished, and rollouts not yet learnt from are to be made again."""
        (self.folder / "finished").unlink(missing_ok=True)
        last = self.latest("grpo")
        for step, path in episode_files(self.folder).items():
            if last is None or step > last.step:
                path.unlink()


def episode_files(folder: str | Path) -> dict[int, Path]:
    """A run folder's files of episodes by their step, the first step first."""
    found = {path: re.fullmatch(r"step-(\d+)\.jsonl\.gz", path.name) for path in Path(folder).glob("episodes/step-*")}
    return {int(name[1]): path for path, name in sorted(found.items()) if name}


def read_episodes(path: str | Path) -> list[Episode]:
    """The episodes of a file of a run folder. RunError if it is damaged."""
    folder = Path(path).parent.parent
    env = read_settings(folder).get("env", STL) if (folder / "config.json").exists() else STL
    try:
        lines = gzip.decompress(Path(path).read_bytes()).splitlines()
        return [Episode.from_json(json.loads(line), env) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"{path}: cannot be read ({reason}); delete it, and its step is sampled again") from None


def changed_settings(config: Config, folder: Path) -> list[str]:
    """How `config` differs from what the run was begun with, as "lr 1e-05 -> 0.5", where that changes results."""
    from rl.config import Config, to_json

    defaults = json.loads(json.dumps({field.name: field.default for field in fields(Config)}))
    new, old = to_json(config), defaults | read_settings(folder)  # begun before a setting existed: its default
    return [f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in old | new
            if old.get(key) != new.get(key) and key not in HARMLESS]


def run_folder(config: Config, root: str | Path = "runs", new: bool = False) -> Path:
    """The folder that Run.open takes: runs of one name are NAME, NAME-2, NAME-3, ..., without those that a run with
    such a name of its own has taken."""
    def numbered(number: int) -> Path:
        return Path(root) / (config.name if number == 1 else f"{config.name}-{number}")

    names = (re.fullmatch(re.escape(config.name) + "(?:-([1-9][0-9]*))?", path.name) for path in Path(root).glob("*"))
    numbers = [int(name[1] or 1) for name in names if name and _is_of(Path(root) / name[0], config.name)]
    if numbers and not new:
        return numbered(max(numbers))
    return next(folder for number in count(max(numbers, default=0) + 1) if not (folder := numbered(number)).exists())


def _is_of(folder: Path, name: str) -> bool:
    """Whether a folder's run has this name: by its settings, or without them by the folder's own."""
    try:
        return name == (read_settings(folder).get("name") if (folder / "config.json").exists() else folder.name)
    except RunError:
        return True  # whoever goes on with it is told


def run_of(folder: str | Path) -> Path:
    """The run folder that a checkpoint's folder belongs to; any other folder itself."""
    path = Path(folder).absolute()
    inside = path.parent.name == "checkpoints" and CHECKPOINT.match(path.name) and (path / "state.json").is_file()
    return path.parents[1] if inside else Path(folder)


def newest_run(root: str | Path = "runs") -> Path | None:
    """The run below `root` whose last complete checkpoint is the newest; None if no run has one."""
    found = [(last.stat().st_mtime, path.parent) for path in Path(root).glob("*/config.json")
             if (last := _newest(path.parent))]
    return max(found)[1] if found else None


def latest_checkpoint(folder: str | Path, stage: str | None = None) -> Checkpoint | None:
    """The last complete checkpoint of a run folder (of one stage, if given); None without one. Takes no lock."""
    last = _newest(Path(folder), stage)
    return read_checkpoint(last) if last else None


def read_checkpoint(folder: Path) -> Checkpoint:
    stage, step = CHECKPOINT.match(folder.name).groups()
    state = read_json(folder / "state.json")
    state.pop("files", None)
    return Checkpoint(stage, int(step), folder, state)


def best_checkpoint(folder: str | Path, stage: str = "grpo") -> Path | None:
    """The stage's checkpoint with the highest held-out success (sampled, not greedy), of equals the last; or None."""
    rows = [row for row in read_rows(folder, "eval") if row["of"] == stage and row["temperature"] > 0]
    kept = {int(path.name.rpartition("-")[2]): path for path in _checkpoints(Path(folder), stage)}
    found = [(row["success"], row["step"]) for row in rows if row["step"] in kept]
    return kept[max(found)[1]] if found else None


def read_settings(folder: str | Path) -> dict:
    """The settings of a run, for rl.config.from_json. RunError if they cannot be read."""
    return {key: value for key, value in read_json(Path(folder) / "config.json").items() if key not in FORMER}


def read_json(path: Path) -> dict:
    """The object that write_json wrote. RunError names the file if it is not there or holds something else."""
    try:
        data, reason = json.loads(path.read_bytes()), "it holds no JSON object"
    except (OSError, ValueError) as error:
        data, reason = None, error
    if not isinstance(data, dict):
        raise RunError(f"{path}: cannot be read ({reason}), but a run folder needs it")
    return data


def read_rows(folder: str | Path, stage: str | None = None) -> list[dict]:
    """The metrics of a run in order, without a last line that is still being written. RunError if they are broken."""
    path = Path(folder) / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in (path.read_bytes().split(b"\n")[:-1] if path.exists() else [])]
        for row in rows:
            itemgetter("stage", "step", *["of", "temperature"] * (row["stage"] == "eval"))(row)
        return [row for row in rows if stage in (None, row["stage"])]
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path}: a line is no row of metrics ({error!r}); mend or delete it") from None


def versions() -> dict:
    """Python, machine, packages and the git commit ("" outside a repository)."""
    found = {package.name.lower(): package.version for package in importlib.metadata.distributions(path=sys.path)}
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"], text=True,
                             cwd=Path(__file__).parent, capture_output=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        git = ""
    return {"python": platform.python_version(), "machine": platform.platform(), "git_commit": git,
            "packages": {name: found[name] for name in PACKAGES if name in found}}


def write_file(path: Path, content: bytes) -> None:
    """Write `path` so that it is either as before or complete, even if the machine stops. RunError on a full disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written, such as to a full disk, as a RunError that says how to go on."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(f"{path}: cannot be written ({reason}); what was there is whole: mend that, and "
                       "give the same command again") from None


def write_json(path: Path, data: dict) -> None:
    write_file(path, json.dumps(data, indent=1).encode() + b"\n")


def _line(row: dict) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _rename(source: Path, target: Path) -> None:
    """Rename, and have the disk remember it."""
    source.replace(target)
    handle = os.open(target.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove(checkpoint: Path) -> None:
    """Delete so that a kill on the way leaves no half of it under its name."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f"tmp-old-{checkpoint.name}")))


def _checkpoints(folder: Path, stage: str) -> list[Path]:
    found = [path.parent for path in (folder / "checkpoints").glob(f"{stage}-*/state.json")]
    return sorted(path for path in found if CHECKPOINT.fullmatch(path.name))


def _newest(folder: Path, stage: str | None = None) -> Path | None:
    found = [path for name in ([stage] if stage else STAGES) for path in _checkpoints(folder, name)]
    return found[-1] if found else None


def _damage(checkpoint: Path) -> str | None:
    """Which of a checkpoint's files is missing, not as long as it was saved, or without a header that can be read; None
    if nothing is wrong."""
    try:
        sizes = json.loads((checkpoint / "state.json").read_bytes()).get("files", {})  # runs of old do not say
    except (OSError, ValueError) as error:
        return f"state.json: {error}"
    for name, size in sizes.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if (found := (checkpoint / name).stat().st_size) != size:
            return f"{name} has {found} bytes, not {size}"
    for path in checkpoint.glob("**/*.safetensors"):
        try:
            with safe_open(path, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{path.name}: {error}"
    return None
