"""Runs a program and prints the mean time of its steps in seconds, by a clock of its own at every end of an
optimizer's step: python _step_clock.py PROGRAM SECONDS [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UPS = 8


def main() -> None:
    program, seconds = sys.argv[1], float(sys.argv[2])
    sys.argv = [program, *sys.argv[3:]]
    times: list[float] = []

    def stepped(*_: Any) -> None:
        times.append(time.perf_counter())
        if len(times) > WARM_UPS + 1 and times[-1] - times[WARM_UPS] > seconds:
            report()

    def report() -> None:
        os.write(2, f"\n{(times[-1] - times[WARM_UPS]) / (len(times) - 1 - WARM_UPS)}\n".encode())
        # Not through handlers of the program, which may save or wait for workers.
        os._exit(0)

    register_optimizer_step_post_hook(stepped)
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    runpy.run_path(program, run_name="__main__")
    report()


if __name__ == "__main__":
    main()
