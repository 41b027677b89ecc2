"""`python -m tests.bench [--only GROUP] [--quick]`: measures, prints a table, writes build/bench.json.

A missed goal is a result and is printed as one; the exit code is 1 only where a figure
could not be measured at all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable

from kvservice import native
from tests.bench import cpu, lookup, one_sided, planner, shm, single, tcp
from tests.bench.daemons import ROOT
from tests.bench.harness import COMMAND, Bench, table, write_json

GROUPS: dict[str, Callable[[Bench], None]] = {
    "shm": shm.run,
    "single": single.run,
    "lookup": lookup.run,
    "tcp": tcp.run,
    "cpu": cpu.run,
    "planner": planner.run,
    "ucx": one_sided.run,
}
"""In the order in which they run; later work adds its own."""

RESULT = ROOT / "build" / "bench.json"
EXIT_NOT_MEASURED = 1


def main() -> int:
    """Run the groups that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure against limits.")
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, wider intervals")
    options = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    kernel = "native" if native.IS_NATIVE else f"NumPy ({native.why_not_native()})"
    print(f"copies: {kernel}; load before: {load}", file=sys.stderr)
    records = []
    failed: list[str] = []
    for name in options.only or GROUPS:
        bench = Bench(is_quick=options.quick)
        started = time.monotonic()
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            GROUPS[name](bench)
        except Exception:  # noqa: BLE001 # border: main
            failed.append(name)
            traceback.print_exc()
        records += [figure.record(f"{COMMAND} --only {name}") for figure in bench.figures]
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    write_json(RESULT, records)
    print(table(records))
    misses_count = sum(record["holds"] is False for record in records)
    print(f"{len(records)} figures, {misses_count} missed; written to {RESULT.relative_to(ROOT)}")
    if failed:
        print(f"not measured to the end: {', '.join(failed)}")
    return EXIT_NOT_MEASURED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
