"""Commands in processes of their own that need not import torch: each is forked from one that has imported it.

A child is a process like any other: it has its own output, exit code and memory, and can be interrupted and killed.
What it does not show is how ``python -m feddpc`` starts; a few tests start that too.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("feddpc.build", "feddpc.cli.explain", "feddpc.cli.train", "feddpc.study", "matplotlib.pyplot"),
        *("feddpc.report.figures", "feddpc.report.page", "feddpc.report.partition_picture", "plotly.graph_objects"),
    ]
)


def _child(function, args, cwd, env, out, err):
    """Become a process of that output, environment and folder, and do it."""
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    function(*args)


def command_line(*args):
    """Do what the installed command does with ``args``."""
    sys.argv = ["feddpc", *args]
    from feddpc.cli import main

    main()


def command_line_without(modules, *args):
    """Do the same where these modules cannot be imported, nor what has imported them."""
    sys.modules.pop("feddpc.report.partition_picture")
    del sys.modules["feddpc.report"].partition_picture
    for name in [*sys.modules, *modules]:
        if name.partition(".")[0] in modules:
            sys.modules[name] = None
    command_line(*args)


class Forked:
    """A process that was forked, with the part of ``subprocess.Popen`` that tests use; output is text."""

    def __init__(self, function, *args, cwd, env=None):
        self.folder = Path(tempfile.mkdtemp(prefix="forked-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.args = (function.__name__, *args)
        paths = [str(self.folder / name) for name in ("out", "err")]
        self._process = CONTEXT.Process(target=_child, args=(function, args, str(cwd), dict(env or os.environ), *paths))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        """Wait for the end; return all output and all errors."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return tuple(p.read_text() if (p := self.folder / name).exists() else "" for name in ("out", "err"))


def run(function, *args, cwd, env=None, timeout=120):
    """Call ``function`` in a process of its own; return what it said and its exit code."""
    process = Forked(function, *args, cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
