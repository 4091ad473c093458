"""The page of a profile: the sections of its terminal report, with figures, as one HTML file that needs nothing else.

    write_profile(profile, peaks, machine, Path("runs/a/profile.html"))

Importing this needs neither matplotlib nor jinja2; writing does (`pip install 'recperf[report]'`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import MachineError
from ...files import write_atomic, writing
from . import profile_sections as sections
from . import profile_words as say
from . import ranks
from .blocks import Badge, RunView, Section, Text, Tile
from .builder import environment
from .profile_sections import Page
from .words import component

CONFIDENCE = {"high": "good", "medium": "plain", "low": "warning"}

SECTIONS: tuple[tuple[str, str, str, Callable[[Page], list[Any]]], ...] = (
    ("evidence", "Verdict", "", sections.verdict),
    ("budget", "Step budget", "", sections.budget),
    ("operators", "Operators", "operator_table", sections.operators),
    ("kernels", "Kernels", "kernels", sections.kernels),
    ("roofline", "Roofline", "roofline", sections.roofline),
    ("idle", "Device idle", "idle", sections.idle),
    ("transfers", "Transfers", "transfers", sections.transfers),
    ("embeddings", "Embeddings", "embeddings", sections.embeddings),
    ("communication", "Communication", "communication", sections.communication),
    ("fixes", "Fixes ranked", "fixes", sections.fixes),
    ("trust", "Trust", "", sections.trust),
)
"""Key, title, the part of the profile whose absence the section must explain, and what fills it."""


def write_profile(
    profile: dict[str, Any], peaks: dict[str, Any] | None, machine: dict[str, Any] | None, target: Path
) -> Path:
    """Draw the page and put it in place whole."""
    text = page(profile, peaks, machine)
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text.encode())
    except MachineError as error:
        fix = error.fix.replace("--run-dir", "--out") if error.fix else None
        raise MachineError(error.what, where={"file": target}, fix=fix) from error
    return target


def page(profile: dict[str, Any], peaks: dict[str, Any] | None, machine: dict[str, Any] | None) -> str:
    """The whole page as text."""
    pages = environment()
    shown = view(Page(say.clean(profile), say.clean(peaks), say.clean(machine)))
    text: str = pages.get_template("template.html.j2").render(
        title=f"{shown.title}: profile",
        comparison=None,
        summary=None,
        runs=[shown],
        several=False,
        version=__version__,
    )
    return text


def view(of: Page) -> RunView:
    profile, found = of.profile, say.verdict(of.profile)
    versions = (profile.get("trust") or {}).get("versions") or {}
    told = [profile["device"], f"batch {profile['batch_size']:,}"]
    told += [f"torch {versions['torch']}"] if versions.get("torch") else []
    told += [f"{profile['mode']} mode"] if profile.get("mode") else []
    return RunView(
        key="profile",
        title=profile.get("workload") or "profile",
        name=profile.get("preset") or "",
        subtitle=" · ".join(["profile", *told]),
        verdict=found["sentence"] if found else "What limits this step was not measured.",
        measured=found is not None,
        command="",
        badges=badges(found),
        tiles=tiles(profile),
        sections=[
            Section(key, title, _blocks(of, lacks, fill)) for key, title, lacks, fill in SECTIONS
        ],
    )  # fmt: skip


def _blocks(of: Page, key: str, fill: Callable[[Page], list[Any]]) -> list[Any]:
    why = say.missing(of.profile, key) if key else None
    return [Text(f"Not measured: {why}.", "missing")] if why else fill(of)


def badges(found: dict[str, Any] | None) -> list[Badge]:
    if not found:
        return []
    shown = [Badge(found["name"], "plain")]
    if found.get("confidence"):
        shown.append(Badge(f"{found['confidence']} confidence", CONFIDENCE.get(found["confidence"], "plain")))
    return shown


def tiles(profile: dict[str, Any]) -> list[Tile]:
    step = profile["step_ms"]
    shown = [Tile("a step", say.time(step["p50"]), f"p20 – p80: {say.times(step)}, {profile['steps']:,} steps")]
    largest = max(profile["components"], key=lambda part: part["share"])
    shown.append(Tile("largest part", say.percent(largest["share"], 0), component(largest["name"])))
    if not say.missing(profile, "idle") and profile["idle"]["wall_ms"]:
        idle = profile["idle"]
        cause = max(idle["causes"].items(), key=lambda item: item[1], default=("", 0.0))
        shown.append(Tile("device idle", say.percent(idle["idle_ms"] / idle["wall_ms"], 0), f"most of it: {cause[0]}"))
    else:
        shown.append(Tile("samples a second", f"{profile['batch_size'] / step['p50'] * 1e3:,.0f}" if step["p50"] else
                          say.NONE, "at the median step"))  # fmt: skip
    fixes = [] if say.missing(profile, "fixes") else profile["fixes"]
    tried = [fix for fix in fixes if fix.get("measured_gain") and fix["status"] != "rejected"]
    offered = [fix for fix in fixes if fix.get("predicted_gain")]
    if tried:
        best = max(tried, key=lambda fix: fix["measured_gain"])
        shown.append(Tile("best fix tried", say.gain(best["measured_gain"]), best["title"]))
    elif offered:
        best = max(offered, key=lambda fix: fix["predicted_gain"])
        shown.append(Tile("best fix, predicted", say.gain(best["predicted_gain"]), best["title"]))
    several = ranks.several(profile)
    if several:
        shown.append(Tile("slowest rank", str(several["slowest"]), f"of {several['ranks']}, by its own work"))
        note = f"{say.time(several['exposed_ms'])} of a step, mean over the ranks"
        shown.append(Tile("exposed communication", say.percent(several["exposed_share"], 0), note))
    return shown
