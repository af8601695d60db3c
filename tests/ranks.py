"""Processes that call functions of test modules together, as the ranks of a gloo process group.

Starting them takes seconds, so they stay: a world is started with its first call, and anew after one that
failed, since ranks may then be out of step. They are forked from a server that has imported torch before.
"""

import contextlib
import datetime
import functools
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from multiprocessing.connection import wait

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# what ranks would otherwise import one by one
PRELOADED = ["tests.ranks", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
PRELOADED += ["torch.distributed.tensor", "torch.distributed.optim", "fusedstep"]
PRELOADED += ["fusedstep._engines.cpu", "tests.cases", "tests.numerics", "pytest"]
# seconds that the others have to end, too, after a rank failed
GRACE = 8


def serve(connection, rank, size, store, timeout):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        torch.manual_seed(0)
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class World:
    """`size` ranks, whose collectives give up after `timeout` seconds."""

    def __init__(self, size, timeout=300):
        self.size, self.timeout, self.ranks = size, timeout, []

    def start(self):
        CONTEXT.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        for rank in range(self.size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=serve, args=(there, rank, self.size, store, self.timeout), daemon=True
            )
            process.start()
            there.close()
            self.ranks.append((process, here))

    def call(self, function, *args):
        """Call it on every rank; what each returned, or the exception of a rank that died or failed."""
        if not self.ranks:
            self.start()
        for _, connection in self.ranks:
            connection.send((function, args))
        results, pending = [None] * self.size, {c: i for i, (_, c) in enumerate(self.ranks)}
        end = time.monotonic() + self.timeout + 60
        while pending and (ready := wait([*pending], max(0, end - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    fine, value = connection.recv()
                    results[rank] = value if fine else RuntimeError(value)
                except (EOFError, OSError):
                    results[rank] = ChildProcessError(f"rank {rank} died")
                if isinstance(results[rank], Exception):
                    # the others may wait for it
                    end = min(end, time.monotonic() + GRACE)
        for rank in pending.values():
            results[rank] = TimeoutError(f"rank {rank} has not come back")
        if any(isinstance(result, Exception) for result in results):
            self.close()
        return results

    def run(self, function, *args):
        """The same, where all must succeed."""
        results = self.call(function, *args)
        errors = {str(result): i for i, result in enumerate(results) if isinstance(result, Exception)}
        if errors:
            shown = "\n".join(f"rank {rank} of {self.size}: {error}" for error, rank in errors.items())
            raise AssertionError(shown)
        return results

    def close(self):
        for process, connection in self.ranks:
            connection.close()
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        if self.ranks:
            self.folder.cleanup()
        self.ranks = []


@contextlib.contextmanager
def world(size, timeout=300):
    ranks = World(size, timeout)
    try:
        yield ranks
    finally:
        ranks.close()


@functools.cache
def mesh(*sizes):
    """Of one dimension, or of two that HSDP and tensor parallelism know by name."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
