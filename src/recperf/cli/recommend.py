"""recperf recommend RUN"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..jsonfile import as_json
from ..terminal import Terminal, print_json, table
from ..units import number
from .parse import ForceOption, parse
from .score import ModelOptions, open_run

if TYPE_CHECKING:
    from ..execution.recommending import Requests

DESCRIPTION = """List the items that users most likely see and like, exact over the whole catalogue: score is the
predicted probability of a positive label, rank_score its logarithm plus that of the probability that a user sees the
item. Next-item models list the items that users most likely take next, also for histories that are not in the data.
Models of events read each user's whole history in the store. Users and items are your own ids."""
LAST = ("score", "logit", "rank_score")
"""The last columns of a file of recommendations."""
MOST_SHOWN = 20
"""Users whose items are printed; more go to a file."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, ForceOption):
    users: tuple[str, ...] = ()
    """Ids of users."""
    all_users: bool = False
    """Every user of the data."""
    history: tuple[str, ...] = ()
    """For next-item models, histories of users that need not be in the data: ids of items separated by commas, the
    newest last."""
    time: str | None = None
    """When recommendations are requested, as 2026-05-21T18:30 or in seconds since 1970: of next-item models of events
    with times, which read the events before it. Default: now."""
    k: int = 10
    """Items for each user."""
    exclude_seen: bool = False
    """Leave out the items that a user has in the training rows; with models of events, in any event of the store or in
    the history. Next-item models do so unless users take items again."""
    include_seen: bool = False
    """Keep these items."""
    allow_unknown: bool = False
    """Also accept over 100 users of which more than half are unknown to the data of the model."""
    output: Path | None = None
    """The file to write, .parquet or .csv, with the columns of user and item by your names, rank, title if there are
    titles, score, logit and rank_score; without one the items of up to 20 users are printed. An older such table is
    replaced."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf recommend", description=DESCRIPTION)
    if sum((bool(options.users), options.all_users, bool(options.history))) != 1:
        what = "give one of --users, --all-users and --history"
        raise UsageError(what, fix="recperf recommend RUN --users 1 2 3")
    if options.exclude_seen and options.include_seen:
        raise UsageError("--exclude-seen and --include-seen exclude each other", fix="leave one out")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    run = open_run(options, terminal)
    from ..execution.recommending import quality_of, recommend
    from ..execution.scoring import table_file, write_rows
    from ..execution.serving import require_known
    from .data.output import Bar

    place = None if options.output is None else table_file(options.output, LAST, force=options.force)
    users, lists, at = requests_of(run.model, options), list[Any](), second_of(options.time)
    if options.output is None and len(users) > MOST_SHOWN:
        raise UsageError(f"{len(users):,} users are too many to print", fix="--output recommendations.parquet")
    bar, done = Bar(terminal, "recommending", "users"), 0
    unknown, seen = users.unknown, True if options.exclude_seen else False if options.include_seen else None
    require_known(unknown, 0 if options.allow_unknown else len(users))

    def tables() -> Iterator[Any]:
        nonlocal done
        for rows in recommend(run.model, users, options.k, exclude_seen=seen, time=at, lists=lists):
            done += len(rows.column(0).unique())
            bar(done, len(users))
            yield rows

    began, rows = perf_counter(), []
    try:
        if place is not None:
            write_rows(place, tables())
        else:
            rows = [row for one in tables() for row in one.to_pylist()]
    finally:
        terminal.close()
    seconds = perf_counter() - began
    meeting = run.model.meeting
    summary = {
        **as_json(run.model.facts),
        "users": len(users),
        "unknown": {column: one.rows for column, one in unknown.items()},
        "seconds": round(seconds, 3),
        "users_per_s": round(len(users) / max(seconds, 1e-9), 1),
        "meeting": None if meeting is None else meeting[1],
        "lists": quality_of(lists, run.model),
        "output": None if options.output is None else str(options.output),
    }
    say(terminal, rows, summary)
    if options.json:
        print_json({**summary, **({"recommendations": rows} if options.output is None else {})})
    return 0


def say(terminal: Terminal, rows: list[Any], summary: dict[str, Any]) -> None:
    """Print the lists, and how they were made."""
    from ..execution.serving import unknown_text
    from ..runs.report.quality_sections import lists_text

    if rows:
        # For people without the logits.
        *names, score, _, rank_score = rows[0]
        lines = [[*names, score, rank_score]]
        for row in rows:
            known = ["" if row[name] is None else str(row[name]) for name in names]
            lines.append([*known, f"{row[score]:.4f}", f"{row[rank_score]:.4f}"])
        terminal.say(table(lines))
        meets = f"log of the probability that a user sees the item, {summary['meeting']}, times the score"
        terminal.say(f"ordered by rank_score: the {meets if summary['meeting'] else 'logit'}")
    speed = f"{summary['device']}: {number(summary['users_per_s'])} users/s"
    people = "1 user" if summary["users"] == 1 else f"{summary['users']:,} users"
    terminal.say(f"{people} in {summary['seconds']:.1f} s on {speed}")
    if summary["lists"] is not None:
        terminal.say(f"  {lists_text(summary['lists'])}")
    if note := unknown_text(summary["unknown"]):
        terminal.say(f"  {note}")
    if summary["output"] is not None:
        terminal.say(f"  recommendations: {summary['output']}")


def second_of(text: str | None) -> int | None:
    """Seconds since 1970 of a number or of ISO text, which is UTC unless it says otherwise."""
    if text is None or text.isdigit():
        return None if text is None else int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        what = f"--time is {text!r}, which is no time: {error}"
        raise UsageError(what, fix="--time 2026-05-21T18:30, or seconds since 1970") from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())


def requests_of(model: Any, options: Options) -> Requests:
    """The users or histories that the options name."""
    from ..data.tables import pyarrow
    from ..execution.recommending import Requests, require_recommender

    users, _ = require_recommender(model)
    if options.history:
        return Requests.of_histories(model, [one.replace(",", " ").split() for one in options.history])
    return Requests.of_users(model, users.values if options.all_users else pyarrow().array(options.users))
