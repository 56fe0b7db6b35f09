"""Long runs that must hold: prints what they find, exits with 1 if one does not.

python benchmarks/soak.py                          # hours; `make soak` keeps the log
python benchmarks/soak.py --kills 3 --seconds 20   # does it run at all?

kills    the tests that kill a server or a pool with `kill -9`, again and again
growth   10^6 steps of 10,000 streams; memory must stay flat
decay    500 sockets for half an hour: the mean batch of the last tenth within 5 % of the first's
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"


def say(what: str, **found: object) -> None:
    print(json.dumps({"at": time.strftime("%Y-%m-%d %H:%M:%S"), "what": what, **found}), flush=True)


def kills(times: int) -> bool:
    files = [str(TESTS / name) for name in ("test_streaming_store.py", "test_serve_sockets.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "kill_9 or s20", *files]
    passed = 0
    for _ in range(times):
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
        passed += done.returncode == 0
        if done.returncode:
            say("kills", failed=done.stdout[-2000:])
    say("kills", passed=passed, of=times)
    return passed == times


def growth(steps: int) -> bool:
    done = subprocess.run([sys.executable, HERE / "streams.py", "--steps", str(steps)])
    say("growth", flat=done.returncode == 0)
    return done.returncode == 0


def decay(seconds: float) -> bool:
    command = [sys.executable, HERE / "streams_serve.py", "--streams", "500", "--rate", "10"]
    done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True)
    if done.returncode:
        say("decay", failed=done.stderr[-2000:])
        return False
    found = json.loads(done.stdout)
    first, last = found["batch_first_tenth"], found["batch_last_tenth"]
    say("decay", **found)
    return last >= 0.95 * first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1800.0)
    options = parser.parse_args()
    results = [kills(options.kills), growth(options.steps), decay(options.seconds)]
    say("all", held=all(results))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
