"""The table `raw` of an import: what the label and the time of its rows are in SQL, and which rows do not fit.

SQL converts whole columns and gives NULL for a value that does not fit; the first of those is an error that names its
row, its value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import DataError, shorten_middle
from . import values as sql
from .file import Source
from .options import FileOptions, TimeUnit
from .text_rows import BadRows
from .values import LAST_SECOND, MISSING, TIME_UNITS, column_types, fetch_row

POSITIVE_SHARE = 0.8
"""A rating of at least this share of the largest one is positive: 4 of 5."""
_AT_ONCE = 16
"""Columns that one query checks."""
_VALUES_SHOWN = 5
_REPAIR = "repair or remove that row, or check which column is which"


@dataclass(frozen=True)
class _Check:
    wrong: str
    column: str
    subject: str
    allowed: str
    fix: str


class RawRows:
    """Rows that do not fit are left out as far as `bad` allows. Columns of `raw` have names of ours."""

    def __init__(self, connection: Any, source: Source, options: FileOptions, bad: BadRows) -> None:
        self.connection, self.source, self.options, self.bad = connection, source, options, bad
        self.kinds = column_types(connection, "raw")
        self._checks: list[_Check] = []

    def row(self, query: str) -> tuple[Any, ...]:
        return fetch_row(self.connection, f"SELECT {query}")

    def count(self) -> int:
        """The number of rows; none is an error."""
        rows = int(self.row("count(*) FROM raw")[0])
        if not rows:
            raise self.error(f"the file has {'a header and ' * self.source.has_header}no rows", "name a file with rows")
        return rows

    def error(self, what: str, fix: str) -> DataError:
        return DataError(what, where={"file": self.source.path}, fix=fix)

    def refuse(self, wrong: str, column: str, subject: str, allowed: str, fix: str = _REPAIR) -> None:
        """Leave out the rows for which SQL says that their value of a column is not what is allowed."""
        self._checks.append(_Check(wrong, column, subject, allowed, fix))

    def number(self, column: str) -> str:
        """SQL for a finite number, or NULL."""
        return sql.number(f'"{column}"', self.kinds[column])

    def positive(self, column: str, name: str, *, is_rating: bool) -> tuple[str, float | None]:
        """SQL for whether a row is positive by its label or rating, and the least rating that is."""
        kind, options, value = self.kinds[column], self.options, f'"{column}"'
        if is_rating:
            rating, threshold = self.number(column), options.positive_from
            if threshold is None:
                threshold = round(POSITIVE_SHARE * (self.row(f"max({rating}) FROM raw")[0] or 0.0), 6)
            self.refuse(f"{rating} IS NULL", column, "rating", "a number")
            return f"({rating} >= {threshold!r})", threshold
        label = f"({sql.label(value, kind, options.positives)})"
        if not options.positives:
            self._require_two_labels(sql.category(value, kind), name)
        self.refuse(f"{label} IS NULL", column, "label", "0 or 1, false or true")
        return f"{label}::BOOLEAN", None

    def _require_two_labels(self, text: str, name: str) -> None:
        query = f"SELECT DISTINCT {text} AS text FROM raw WHERE text IS NOT NULL ORDER BY 1 LIMIT {_VALUES_SHOWN + 1}"
        values = [value for (value,) in self.connection.execute(query).fetchall()]
        usual = [value for value in values if value.lower() in (*sql.TRUE, *sql.FALSE)]
        # Other values may be bad rows that are left out.
        if len(usual) <= 2 and (usual == values or self.options.skip_bad):
            return
        more = len(values) > _VALUES_SHOWN
        shown = ", ".join(values[:_VALUES_SHOWN]) + " and more" * more
        counted = f"more than {_VALUES_SHOWN} values" if more else f"{len(values)} value{'s' * (len(values) != 1)}"
        what = f"the label {name!r} has {counted} ({shown}); allowed: 0 and 1, or false and true"
        fix = f"--positives VALUE names the positive ones, --rating {name} --positive-from NUMBER the least of them"
        raise self.error(what, fix)

    def time(self, column: str, *, first: int) -> tuple[str, TimeUnit]:
        """SQL for the time of a row in microseconds, none before the `first` second, and the unit of the column."""
        kind, unit = self.kinds[column], self.options.time_unit
        if unit == "auto":
            unit = self._unit(column, kind)
        allowed = f"an ISO time {'until' if first else 'from 1970 to'} 2106 like 2024-05-01T12:00:00"
        per_second = 0
        if unit != "iso":
            name, per_second = TIME_UNITS[unit]
            allowed = f"a time of {first * per_second:,} to {LAST_SECOND * per_second:,} {name}"
        time = sql.microseconds(f'"{column}"', kind, per_second)
        least, most = first * 1_000_000, (LAST_SECOND + 1) * 1_000_000 - 1
        wrong = f"coalesce({time} NOT BETWEEN {least} AND {most}, true)"
        self.refuse(wrong, column, "time", allowed, "check --time-unit: s, ms, us, ns or iso")
        return time, unit

    def _unit(self, column: str, kind: str) -> TimeUnit:
        """The coarsest unit in which the largest time is before 2106; text that is no number is ISO."""
        if sql.is_time(kind):
            return "iso"
        least, largest = self.row(f"min(number), max(number) FROM (SELECT {self.number(column)} AS number FROM raw)")
        if largest is None:
            return "iso" if sql.is_text(kind) else "s"
        units: list[TimeUnit] = ["s", "ms", "us", "ns"]
        # Both small and large numbers are two units in one column: the first large one will be named.
        fitting = (unit for unit in units if largest <= LAST_SECOND * TIME_UNITS[unit][1])
        return "s" if least <= LAST_SECOND else next(fitting, "s")

    def leave_out(self) -> None:
        """Remove the rows that do not fit, if they are not too many."""
        # Rows are removed when all are known: until then they count as in the file.
        self.connection.execute("CREATE TABLE left_out (position BIGINT)")
        for first in range(0, len(self._checks), _AT_ONCE):
            self._find(self._checks[first : first + _AT_ONCE])
        self.connection.execute("DELETE FROM raw WHERE rowid IN (FROM left_out)")

    def _find(self, checks: list[_Check]) -> None:
        cells = [check.wrong for check in checks] + [f'"{check.column}"::VARCHAR' for check in checks]
        rows = self.connection.execute(
            f"SELECT rowid, {', '.join(cells)} FROM raw WHERE ({' OR '.join(check.wrong for check in checks)}) "
            f"AND rowid NOT IN (FROM left_out) ORDER BY rowid LIMIT {self.bad.room + 1}"
        ).fetchall()
        for position, *answers in rows:
            faults = zip(checks, answers, answers[len(checks) :])
            check, value = next((check, value) for check, wrong, value in faults if wrong)
            self.bad.add_loaded(position, f": {self._explain(check, value)}", check.fix)
        if rows:
            positions = ", ".join(f"({position})" for position, *_ in rows)
            self.connection.execute(f"INSERT INTO left_out VALUES {positions}")

    def _explain(self, check: _Check, value: str | None) -> str:
        if value is None or value in MISSING:
            return f"no {check.subject}" + (f": {value!r} stands for a missing value" if value else "")
        kind = self.kinds[check.column]
        usual = sql.is_text(kind) or sql.is_integer(kind) or kind in ("FLOAT", "DOUBLE")
        shown = repr(shorten_middle(value, 60)) if sql.is_text(kind) or self.source.delimited else value
        return f"{check.subject} {shown}{'' if usual else f' (of type {kind})'} is not {check.allowed}"
