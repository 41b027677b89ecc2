"""Scripts of this folder as processes that tell where they are; none outlives its block."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from tests.integration.daemon_process import ROOT, ChildClient, plain_environment


class ScriptedChild(ChildClient):
    """A script beside this file; lines to its stdin tell it to go on."""

    def __init__(self, script: str, *arguments: object) -> None:
        command = [sys.executable, str(ROOT / "tests/integration" / script), *map(str, arguments)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=plain_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def tell(self, *words: object) -> None:
        """Write a line of words to it, and do not wait for an answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def is_stopped(self) -> bool:
        """Say whether a SIGSTOP has taken effect, which it does some time after it was sent."""
        result = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return result is not None


@contextlib.contextmanager
def scripted_child(script: str, *arguments: object) -> Iterator[ScriptedChild]:
    """Run a script; it is killed at the end of the block, wherever it is."""
    child = ScriptedChild(script, *arguments)
    try:
        yield child
    finally:
        child.kill()


def say(line: str) -> None:
    """Tell the parent, from within a script."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
