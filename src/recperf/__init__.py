"""recperf trains recommendation models, measures them and explains what limits them.

    report = recperf.profile(step, batches=loader, model=model)
    shop = recperf.dataset(frame, user="customer", item="product", time="when")
    run = recperf.run("next-item", shop, train={"epochs": 3})
    top = run.recommend(["anna", "ben"], k=10)

Importing this imports nothing else: torch is loaded when a name is used.
"""

from __future__ import annotations

from .version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .api import bench, compare, dataset, plan, run
    from .execution.learning import watch
    from .execution.step_profile import Profiler, profile
    from .runs.step_report import Report, load
    from .workloads.opened import OpenRun

    open = OpenRun

_PLACES = {
    **dict.fromkeys(("bench", "compare", "dataset", "plan", "run"), "api"),
    "profile": "execution.step_profile",
    "watch": "execution.learning",
    "Profiler": "execution.step_profile",
    "load": "runs.step_report",
    "Report": "runs.step_report",
    "OpenRun": "workloads.opened",
    "open": "workloads.opened",
}
# Without `open`: a star import must not replace the builtin function.
__all__ = [
    "OpenRun", "Profiler", "Report", "__version__", "bench", "compare", "dataset", "load", "plan", "profile", "run",
    "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'recperf' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f".{_PLACES[name]}", __name__)
    return getattr(module, "OpenRun" if name == "open" else name)


def __dir__() -> list[str]:
    return [*__all__, "open"]
