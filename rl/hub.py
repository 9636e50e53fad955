"""Models from the Hugging Face hub: a name such as "Qwen/Qwen3.5-9B" becomes a local folder."""
import json
import os
import re
import shutil
from pathlib import Path

from rl.config import ConfigError

PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]  # weights, tokenizer and chat template
SPARE = 2**30  # bytes to leave on the disk


def fetch(name: str | Path) -> Path:
    """The folder `name`, or the hub's model of that name: from the cache if it is whole there, else downloaded.

    A download that was interrupted goes on with the files that are not there yet. Raises ConfigError in one line: no
    such folder or model, no network, too little disk or memory.
    """
    if Path(name).is_dir():
        return Path(name)
    what, remedy = f"model = {str(name)!r}", "download the model to a folder, and say --model=FOLDER"
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        raise ConfigError(f"{what}: there is no such folder; {remedy}")
    from huggingface_hub import HfApi, constants, snapshot_download  # comes with transformers

    try:
        folder = Path(snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
        if whole(folder):
            return folder
    except Exception:  # nothing in the cache; errors differ by version
        folder = None
    try:
        sizes = {file.rfilename: file.size or 0 for file in HfApi().model_info(name, files_metadata=True).siblings}
        check_room(what, sizes, folder, Path(constants.HF_HUB_CACHE))
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except ConfigError:
        raise
    except Exception as error:  # whatever a network, a hub or a disk can do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{what}: there is no such folder, and it cannot be fetched from the Hugging Face hub "
                          f"({reason[:300]}); with a network the same command goes on with the download, or {remedy}"
                          ) from None


def whole(folder: Path) -> bool:
    """Whether all files of the weights are there, and a tokenizer: the cache also has folders of broken downloads."""
    try:
        index = folder / "model.safetensors.index.json"
        names = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ["model.safetensors"]
        return all((folder / file).is_file() for file in {*names, "config.json", "tokenizer.json"})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # or the index has another form
        return False


def check_room(what: str, sizes: dict[str, int], folder: Path | None, cache: Path) -> None:
    """Raise ConfigError unless the disk has room for the files that `folder` lacks, and the memory for the weights."""
    wanted = {file: size for file, size in sizes.items() if any(Path(file).match(p) for p in PATTERNS)}
    missing = sum(size for file, size in wanted.items() if folder is None or not (folder / file).exists())
    weights = sum(size for file, size in wanted.items() if file.endswith(".safetensors"))
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free, memory = shutil.disk_usage(place).free, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < missing + SPARE:
        raise ConfigError(f"{what}: {missing / 1e9:.1f} GB are to be downloaded, and {place} has {free / 1e9:.1f} GB "
                          "free; set HF_HOME to a folder on a larger disk")
    if memory < weights:
        raise ConfigError(f"{what}: its weights are {weights / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB "
                          "of memory")
    print(f"{what}: downloading {missing / 1e9:.1f} GB to {cache}", flush=True)
