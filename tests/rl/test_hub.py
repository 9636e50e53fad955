"""A model's name becomes a folder: from the cache, or fetched, or one clear line. The hub is a stand-in."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.config import ConfigError
from rl.hub import fetch

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "Maker/Model-1.5B"
FILES = {"config.json": 100, "tokenizer.json": 200, "model-1.safetensors": 3000, "model-2.safetensors": 4000,
         "model.safetensors.index.json": 50, "picture.png": 10**15}


class Hub:
    """Has FILES; what it downloads it writes, up to `breaks` files, and only what is missing."""

    def __init__(self, folder, breaks=99, online=True):
        self.folder, self.breaks, self.online, self.fetched = folder, breaks, online, []
        self.constants = SimpleNamespace(HF_HUB_CACHE=str(folder))

    def HfApi(self):
        return self

    def model_info(self, name, files_metadata):
        if not self.online or name != NAME:
            raise ConnectionError("[Errno -2] Name or service not known\nand more")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n, size=size) for n, size in FILES.items()])

    def snapshot_download(self, name, allow_patterns, local_files_only=False):
        if local_files_only and not self.folder.exists():
            raise FileNotFoundError("not in the cache")
        self.folder.mkdir(exist_ok=True)
        if not local_files_only:
            wanted = [n for n in FILES if not n.endswith(".png") and not (self.folder / n).exists()]
            for n in wanted[:self.breaks]:
                index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
                (self.folder / n).write_text(json.dumps(index if "index" in n else {}))
                self.fetched.append(n)
            if len(wanted) > self.breaks:
                raise TimeoutError("the connection broke")
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def make(**settings):
        made = Hub(tmp_path / "cache", **settings)
        monkeypatch.setitem(sys.modules, "huggingface_hub", made)
        return made
    return make


def test_a_folder_is_itself(tmp_path, hub):
    hub(online=False)
    assert fetch(tmp_path) == tmp_path


def test_fetched_once_and_found_without_network_afterwards(hub, capsys):
    own = hub()
    assert fetch(NAME) == own.folder
    assert sorted(own.fetched) == sorted(FILES.keys() - {"picture.png"})
    assert "downloading 0.0 GB" in capsys.readouterr().out
    assert fetch(NAME) == hub(online=False).folder


def test_a_broken_download_goes_on(hub):
    hub(breaks=3)
    with pytest.raises(ConfigError, match="connection broke.*goes on") as caught:
        fetch(NAME)
    assert "\n" not in str(caught.value)
    hub(online=False)
    with pytest.raises(ConfigError, match="not known"):  # what there is, is not taken for a model
        fetch(NAME)
    own = hub()
    fetch(NAME)
    assert sorted(own.fetched) == ["model-2.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("name, words", [
    (NAME, r"cannot be fetched.*Name or service not known\).*--model=FOLDER"), ("nowhere", "no such folder"),
    ("a/b/c", "no such folder"), ("../Maker/Model", "no such folder"),
])
def test_no_network_and_no_such_model(hub, name, words):
    hub(online=False)
    with pytest.raises(ConfigError, match=words) as caught:
        fetch(name)
    assert "\n" not in str(caught.value)


def test_the_real_package_offline(tmp_path):
    """In a process of its own, as the package reads its environment once."""
    code = "import sys; from rl.hub import fetch\ntry: fetch('Maker/Model')\nexcept ValueError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=100,
                          env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert "cannot be fetched from the Hugging Face hub" in done.stdout and "offline" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        fetch(NAME)


def test_disk_and_memory_are_looked_at_first(hub, monkeypatch):
    own = hub()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30 + 7349))
    with pytest.raises(ConfigError, match="0.0 GB are to be downloaded.*1.1 GB free.*HF_HOME"):
        fetch(NAME)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30 + 7350))
    monkeypatch.setattr("os.sysconf", lambda name: 83)  # 83 x 83 = 6,889 bytes; the weights are 7,000
    with pytest.raises(ConfigError, match="of memory"):
        fetch(NAME)
    assert not own.fetched
    monkeypatch.setattr("os.sysconf", lambda name: 84)
    assert fetch(NAME) == own.folder
