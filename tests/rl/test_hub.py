"""A model's name becomes a folder: from the cache, or fetched, or one clear line.

The real client of the hub talks to a server here that speaks the hub's protocol; a stand-in for the client shows what
must not depend on the client's version, and what disk and memory allow.
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


CONTENT = {"config.json": b"{}", "tokenizer.json": b"{}", "picture.png": b"?" * 9,
           "model-1.safetensors": bytes(range(256)) * 4000, "model-2.safetensors": bytes(reversed(range(256))) * 90_000,
           "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'}


class HubServer(BaseHTTPRequestHandler):
    """The hub's protocol over CONTENT. The connection of `cut` is cut in its middle once, `stuck` never ends."""

    protocol_version = "HTTP/1.1"
    cut = stuck = ""
    sent: list[tuple[str, str | None]]  # file and range of each that was asked for

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        *place, name = self.path.partition("?")[0].split("/")
        listing = [{"type": "file", "path": file, "oid": "b" * 40, "size": len(content), "rfilename": file}
                   for file, content in CONTENT.items()]
        if "tree" in place:
            self.answer(json.dumps(listing).encode())
        elif "models" in place:
            self.answer(json.dumps({"id": NAME, "sha": "a" * 40, "siblings": listing}).encode())
        elif name in CONTENT:
            self.file(name)
        else:
            self.send_error(404)

    def file(self, name: str):
        content, asked = CONTENT[name], self.headers["Range"]
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        broken = self.command == "GET" and name in (self.cut, self.stuck)
        self.answer(content[start:], 206 if asked else 200, len(content) // 2 if broken else None, {
            "ETag": hashlib.sha256(content).hexdigest(), "X-Repo-Commit": "a" * 40,
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"})
        if self.command == "GET":
            self.sent.append((name, asked))
        if broken and name == self.stuck:
            self.rfile.read(1)  # until the client is gone
        elif broken:
            type(self).cut, self.close_connection = "", True

    def answer(self, body: bytes, status: int = 200, until: int | None = None, headers: dict = {}):  # noqa: B006
        self.send_response(status)
        for key, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:until])

    def log_message(self, *_):
        pass


@contextmanager
def hub_server(**broken: str):
    """A server on loopback: its address, and the handler that keeps `sent`."""
    handler = type("Handler", (HubServer,), broken | {"sent": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def start_fetch(home: Path, **environment: str) -> subprocess.Popen:
    """Prints what fetch(NAME) returns or says. A process of its own, as the package reads its environment once."""
    code = f"from rl.hub import fetch\ntry: print(fetch({NAME!r}))\nexcept ValueError as error: print(error)"
    mine = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            env=mine | {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | environment)


def real_fetch(home: Path, **environment: str) -> str:
    out, _ = start_fetch(home, **environment).communicate(timeout=100)
    return out.splitlines()[-1]


def test_the_real_client_fetches_once_and_mends_a_cut_connection(tmp_path):
    with hub_server(cut="model-2.safetensors") as (address, server):
        folder = Path(real_fetch(tmp_path, HF_ENDPOINT=address))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: content for name, content in CONTENT.items() if name != "picture.png"}
    first, second = (asked for name, asked in server.sent if name == "model-2.safetensors")
    assert first is None and second == f"bytes={10 * 2**20}-"  # the client keeps whole blocks of 10 MiB
    assert real_fetch(tmp_path, HF_ENDPOINT=address) == str(folder)  # the server is gone: nobody is asked


def test_the_real_client_goes_on_after_a_kill_with_the_files_that_are_missing(tmp_path):
    with hub_server(stuck="model-2.safetensors") as (address, _):
        process = start_fetch(tmp_path, HF_ENDPOINT=address)
        until = time.monotonic() + 100
        while len({file.name for file in tmp_path.glob("hub/*/snapshots/*/*")}) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
        process.communicate()
    with hub_server() as (address, server):
        folder = Path(real_fetch(tmp_path, HF_ENDPOINT=address))
    assert {name for name, _ in server.sent} == {"model-2.safetensors"}
    assert (folder / "model-2.safetensors").read_bytes() == CONTENT["model-2.safetensors"]


def test_the_real_client_offline(tmp_path):
    said = real_fetch(tmp_path, HF_HUB_OFFLINE="1")
    assert "cannot be fetched from the Hugging Face hub" in said and "offline" in said


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
