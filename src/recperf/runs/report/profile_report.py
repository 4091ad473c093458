"""The report of a profile, in the terminal (`text`) and as a page (`write_page`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import formats as fmt
from . import page, ranks
from .blocks import Badge, Report, Tile
from .profile_facts import why_missing
from .profile_sections import sections
from .step_sections import CONFIDENCE, headline
from .text import render

Profile = dict[str, Any]


def text(profile: Profile, peaks: Profile | None = None, machine: Profile | None = None) -> str:
    """The whole report as plain text."""
    return render(report(profile, peaks, machine))


def html(profile: Profile, peaks: Profile | None, machine: Profile | None) -> str:
    """The whole report as a page."""
    built = report(profile, peaks, machine)
    return page.render(f"{built.title}: profile", [built])


def write_page(profile: Profile, peaks: Profile | None, machine: Profile | None, target: Path) -> Path:
    return page.write(html(profile, peaks, machine), target)


def report(profile: Profile, peaks: Profile | None = None, machine: Profile | None = None) -> Report:
    # Every text of the report comes from these, so one pass here keeps control characters out of all of it.
    profile, peaks, machine = (fmt.all_printable(value) for value in (profile, peaks, machine))
    verdict = profile.get("verdict")
    versions = (profile.get("trust") or {}).get("versions") or {}
    subtitle = [
        profile["device"],
        f"{fmt.time(_plain(profile))} per step of {profile['batch_size']:,} samples",
    ]
    subtitle += [f"torch {versions['torch']}"] if versions.get("torch") else []
    return Report(
        key="profile",
        title=profile.get("workload") or "profile",
        name=profile.get("preset") or "",
        subtitle=" · ".join(subtitle),
        verdict=headline(verdict) if verdict else "What limits this step was not measured.",
        measured=verdict is not None,
        badges=_badges(verdict),
        tiles=_tiles(profile),
        sections=sections(profile, peaks, machine),
    )


def _plain(profile: Profile) -> float:
    """Median step without timers, in ms."""
    return float((profile.get("overhead") or {}).get("plain_ms") or profile["step_ms"]["p50"])


def _badges(verdict: dict[str, Any] | None) -> list[Badge]:
    if not verdict:
        return []
    badges = [Badge(verdict["limit"], "plain")]
    badges.append(Badge(f"{verdict['confidence']} confidence", CONFIDENCE.get(verdict["confidence"], "plain")))
    return badges


def _tiles(profile: Profile) -> list[Tile]:
    step, plain = profile["step_ms"], _plain(profile)
    timed = f"with timers {fmt.time(step['p50'])} (p20 – p80: {fmt.spread(step)}, {profile['steps']:,} steps)"
    tiles = [Tile("step", fmt.time(plain), timed)]
    largest = max(profile["components"], key=lambda part: part["share"])
    tiles.append(Tile("largest part", fmt.percent(largest["share"], 0), fmt.component(largest["name"])))
    if not why_missing(profile, "idle") and profile["idle"]["wall_ms"]:
        idle = profile["idle"]
        cause, _ = max(idle["causes"].items(), key=lambda item: item[1], default=("", 0.0))
        tiles.append(Tile("device idle", fmt.percent(idle["idle_ms"] / idle["wall_ms"], 0), f"main cause: {cause}"))
    else:
        rate = f"{profile['batch_size'] / plain * 1e3:,.0f}" if plain else fmt.NONE
        tiles.append(Tile("batch / median step", f"{rate} samples/s", "without timers; a run states its throughput"))
    fixes = [] if why_missing(profile, "fixes") else profile["fixes"]
    measured = [fix for fix in fixes if fix.get("measured_gain") and fix["status"] != "rejected"]
    predicted = [fix for fix in fixes if fix.get("predicted_gain")]
    if measured:
        best = max(measured, key=lambda fix: fix["measured_gain"])
        tiles.append(Tile("best fix, measured", fmt.gain(best["measured_gain"]), best["title"]))
    elif predicted:
        best = max(predicted, key=lambda fix: fix["predicted_gain"])
        tiles.append(Tile("best fix, predicted", fmt.gain(best["predicted_gain"]), best["title"]))
    several = ranks.of_several(profile)
    if several:
        tiles.append(Tile("slowest rank", str(several["slowest"]), f"of {several['ranks']}, by its own work"))
        note = f"{fmt.time(several['exposed_ms'])} of a step, mean over the ranks"
        tiles.append(Tile("exposed communication", fmt.percent(several["exposed_share"], 0), note))
    return tiles
