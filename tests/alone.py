"""Tests with real processes that failed beside others, once more and alone: python -m tests.alone, after `make test`.

Three at a time on 2 shared cores a process may get no turn for longer than any limit allows. Such a failure is a fault
to be mended, and is named at the end of the output; it does not stop a change if the test passes by itself. All others
(unit, sim, adversarial, golden) depend on no other process: they are never tried again, nor are more than MOST.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITH_PROCESSES = ("tests/cluster/", "tests/netlab/")
MOST = 4


def refusal(failed: Collection[str]) -> str:
    """Why these tests (pytest's node ids) are not tried again, or ""."""
    if not failed:
        return "no test failed, but the run did: see above"
    if others := sorted(f for f in failed if not f.startswith(WITH_PROCESSES)):
        return f"{others[0]} failed, and needs no other process"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed; at most {MOST} are tried again"
    return ""


def main() -> int:
    cache = ROOT / ".pytest_cache/v/cache/lastfailed"
    failed = sorted(json.loads(cache.read_text())) if cache.exists() else []
    if why := refusal(failed):
        print(f"not tried again: {why}", file=sys.stderr)
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", *failed], cwd=ROOT, check=False).returncode
    if code == 0:
        print(f"FAILED BESIDE OTHERS, passed alone, to be mended: {', '.join(failed)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
