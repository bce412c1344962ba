"""`python -m benchmarks [--only NAME …] [--scale 0.1] [--json FILE]`: runs the scenarios and prints a table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from typing import Any

from benchmarks.run import run
from benchmarks.scenarios import ALL

DATABASE = "postgresql+psycopg://postgres@127.0.0.1:5432/test"
BROKER = "redis://127.0.0.1:6379/15"


def main() -> int:
    """Run each scenario in a process of its own, so that none inherits what another has loaded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(ALL), default=list(ALL))
    parser.add_argument("--database", default=os.environ.get("BENCH_DATABASE_URL", DATABASE))
    parser.add_argument("--broker", default=os.environ.get("BENCH_BROKER_URL", BROKER))
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts; figures below 1 are for trying it out")
    parser.add_argument("--json", help="write the results to this file")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: list[dict[str, Any]] = []
    print(f"{'what':56} {'value':>12} {'unit':12} {'bare Celery':>12} {'ratio':>8}")
    for name in given.only:
        queue = context.Queue()
        process = context.Process(target=run, args=(name, given.database, given.broker, given.scale, queue))
        process.start()
        while process.is_alive() or not queue.empty():
            try:
                result = queue.get(timeout=1)
            except Exception:  # queue.Empty of another process's queue: look again whether it lives
                continue
            if result is None:
                break
            results.append(result)
            bare = "" if result["bare"] is None else f"{result['bare']:,.0f}"
            ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f} x"
            print(
                f"{result['what']:56} {result['value']:>12,.2f} {result['unit']:12} {bare:>12} {ratio:>8}", flush=True
            )
        process.join()
        if process.exitcode:
            print(f"{name}: failed", file=sys.stderr)
            return 1
    if given.json:
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine, "database": given.database, "broker": given.broker, "results": results},
                file,
                indent=2,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
