"""Calls, of tools above all, in processes of their own: the sampler goes on meanwhile, and a call that hangs costs one
answer.

A worker reads pickled calls from its standard input and writes their results to its standard output. It ends when its
input does, so also when the parent is killed; its own timer ends it in a call that takes too long.
"""
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait

START = "import sys; sys.path[:] = {path!r}; from rl.workers import serve; serve({seconds!r})"
TRIES = 3  # of a call whose worker dies otherwise than by its timer
DEATHS = 10  # of workers, without a result in between: then it is not the calls


@dataclass
class Batch:
    """Calls that were submitted together, such as those of a turn, and their results so far."""

    key: int
    results: list
    missing: int
    finished: list  # takes (key, results) once nothing is missing

    def enter(self, place: int, result) -> None:
        self.results[place] = result
        self.missing -= 1
        if not self.missing:
            self.finished.append((self.key, self.results))


@dataclass
class Job:
    """One call, pickled, and where its result goes."""

    call: bytes
    place: int
    batch: Batch
    tries: int = 0


class Workers:
    """Runs batches of calls in `count` processes, `seconds` for each call (0: no limit); 0 processes: at once, in this
    one. Batches come back in the order in which they are done; results are in the order of their calls."""

    def __init__(self, count: int, seconds: float):
        self.seconds, self.deaths = seconds, 0
        self.queue: deque[Job] = deque()
        self.processes = [self._start() for _ in range(count)]
        self.busy: dict[int, Job] = {}  # by the index of its process
        self.finished: list[tuple[int, list]] = []

    def submit(self, key: int, calls: list[tuple]) -> None:
        """Run calls, at least one, each (function of a module, argument, ...)."""
        batch = Batch(key, [None] * len(calls), len(calls), self.finished)
        for place, (function, *arguments) in enumerate(calls):
            if self.processes and function is not str:  # a text that is there already waits for nobody
                self.queue.append(Job(pickle.dumps((function, *arguments)), place, batch))
            else:
                batch.enter(place, function(*arguments))
        self._feed()

    def ready(self) -> bool:
        """Whether some worker has a result."""
        return bool(self.finished or self._wait(0))

    def collect(self, block: bool) -> list[tuple[int, list]]:
        """(key, results) of the batches that are done; with `block` wait for one, unless there is none to wait for."""
        while self.busy and (answered := self._wait(None if block and not self.finished else 0)):
            for index in answered:
                self._receive(index)
            self._feed()
        done = list(self.finished)
        self.finished.clear()
        return done

    def forget(self) -> None:
        """Drop all calls: what workers are still busy with goes to a list that nobody reads."""
        self.queue.clear()
        self.finished, self.deaths = [], 0

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self.processes:
            with process:  # closes its pipes and waits for it
                process.kill()

    def _start(self) -> subprocess.Popen:
        command = START.format(path=sys.path, seconds=self.seconds)
        return subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)  # Ctrl-C is ours

    def _wait(self, seconds: float | None) -> list[int]:
        pipes = {self.processes[index].stdout: index for index in self.busy}
        return [pipes[pipe] for pipe in wait(list(pipes), seconds)]

    def _feed(self) -> None:
        for index in range(len(self.processes)):
            while self.queue and index not in self.busy:
                self.busy[index] = self.queue.popleft()
                try:
                    self.processes[index].stdin.write(self.busy[index].call)
                    self.processes[index].stdin.flush()
                except BrokenPipeError:
                    self._bury(index)

    def _receive(self, index: int) -> None:
        try:
            result = pickle.load(self.processes[index].stdout)
        except (EOFError, pickle.UnpicklingError):
            return self._bury(index)
        self.deaths = 0
        job = self.busy.pop(index)
        job.batch.enter(job.place, result)

    def _bury(self, index: int) -> None:
        """Replace a dead worker. The call that it died of is answered so, if by the timer, or else tried again."""
        job, process = self.busy.pop(index), self.processes[index]
        process.stdout.close()
        with suppress(BrokenPipeError):  # of what was not written
            process.stdin.close()
        code = process.wait()
        self.processes[index] = self._start()
        if code == -signal.SIGALRM:
            return job.batch.enter(job.place, f"Error: the call took longer than {self.seconds:g} s and was stopped.")
        job.tries, self.deaths = job.tries + 1, self.deaths + 1
        if self.deaths == DEATHS:
            raise RuntimeError(f"{DEATHS} worker processes died one after the other (exit code {code}); see above why. "
                               "With tool_workers = 0 tools run in this process")
        if job.tries < TRIES:
            self.queue.appendleft(job)
        else:
            job.batch.enter(job.place, "Error: the tool failed.")


@cache
def open_workers(count: int, seconds: float) -> Workers:
    """The process's own Workers of these settings: they outlive a rollout, as starting them takes a moment."""
    return Workers(count, seconds)


def serve(seconds: float) -> None:
    """What a worker does until its input ends."""
    calls, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a tool that prints must not write between the results
    for number in (signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    while calls.peek(1):
        function, *arguments = pickle.load(calls)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = function(*arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pickle.dump(result, results)
        results.flush()
