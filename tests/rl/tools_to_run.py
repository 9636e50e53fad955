"""Tools for test_workers.py, in a file that a worker imports quickly."""
import os
import signal
import time
import zlib

from stl.tools import call_tool


def slow(task, name, arguments, manner):
    """call_tool after a time that has nothing to do with the order of the calls."""
    time.sleep(zlib.crc32(repr((task.id, arguments)).encode()) % 30 / 1000)
    return call_tool(task, name, arguments, manner)


def stubborn(task, name, arguments, manner):
    """Hangs at the start of the first task."""
    if task.id.endswith("-0") and arguments.get("t_start") == 0:
        time.sleep(600)
    return call_tool(task, name, arguments, manner)


def die_once(flag):
    """Kills its process, but not when the folder `flag` is there already."""
    if not os.path.exists(flag):
        os.mkdir(flag)
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"
