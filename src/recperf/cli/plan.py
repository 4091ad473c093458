"""recperf plan WORKLOAD --ranks N --gpu DEVICE"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro

from ..config import within
from ..errors import UsageError
from ..files import write_atomic
from ..plan import advice, failures, skew, target
from ..plan.devices import Device, Network, device_of, from_peaks, network_of
from ..plan.memory import Codec, Wire
from ..plan.network import here
from ..plan.predict import Choices, Prediction, predict, rank_batch_of
from ..plan.sharding import COLUMN_WIDTH, Wish
from ..plan.work import work_of
from . import plan_text
from .options import C, WorkloadOptions, choose, read_options
from .peaks import at_hand
from .terminal import Terminal, print_json

DESCRIPTION = """What a workload would need and how fast it would be on many devices: memory by rank, the parts of a
step, time to the quality target, cost. Several numbers of ranks give a table; docs/planning.md says what is counted,
measured and assumed. The config's batch size counts for all ranks together unless --rank-batch says otherwise."""

Switch = Literal["on", "off"]


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C]):
    ranks: str = "8"
    """Devices that train together: a number, or several as 8,16,32."""
    gpu: str = "h200"
    """h200, b200, mi350x, cpu (this machine, shared by all ranks of a node), or a JSON file."""
    network: str | None = None
    """Between nodes: ib200, ib400, ib800, eth25, loopback, or a JSON file; ib400, and loopback with cpu."""
    ranks_per_node: int | None = None
    """Devices of a node; 8 unless the network says otherwise."""
    global_batch: int | None = None
    """Samples of a step on all ranks together; none: the config's batch size."""
    rank_batch: int | None = None
    """Samples of a step on one rank, in place of a global batch."""
    sharding: Wish = "auto"
    """How all tables are shared out."""
    shard: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """How one table is, as album_id=column; may be given several times."""
    column_width: int = COLUMN_WIDTH
    """Columns a column-wise shard has at least."""
    a2a: Wire = "fp16"
    """What rows and their gradients are sent in."""
    codec: Codec = "in-place"
    """How they become fp16: in place, or clamped into a float32 copy first."""
    dedup: Switch = "on"
    """Ask once for an id that a rank's batch has several times."""
    pipeline: Switch = "on"
    """Copy the next batch and send its ids while this one is learned from."""
    overlap: Switch = "off"
    """Add dense gradients up behind the backward pass, as DDP does; recperf's own ranks do it afterwards."""
    history: float | None = None
    """Mean events of a history (dlrm-v4); none: the published share of the most, or that of the dataset of --skew."""
    efficiency: float = 1.0
    """Times the shares of the device's peaks that are assumed."""
    skew: str | None = None
    """Where popular ids lie: a dataset's folder (dlrm-v4), or zipf:1.05."""
    skew_batches: int = 4
    """Global batches read from a dataset."""
    ids: Literal["as-they-are", "hashed"] = "as-they-are"
    """Whether ids go through a hash before rows are shared out by blocks."""
    price: str | None = None
    """Of one device for an hour: 2.5, 2.5EUR or 2.5USD."""
    samples_to_target: float | None = None
    """Samples that reach the quality target; none: the published ones of dlrm-v4, where they apply."""
    mtbf_hours: float | None = None
    """Mean hours between failures; with it goodput is simulated."""
    mtbf_of: Literal["device", "cluster"] = "device"
    """Whether that is of one device or of all together."""
    checkpoint_seconds: float = 60.0
    """Seconds a checkpoint keeps the training waiting."""
    interval_seconds: float | None = None
    """Seconds of work between two checkpoints; none: sqrt(2 C M)."""
    restart_seconds: float = 300.0
    """Seconds from a failure to the first step after it."""
    failure_seed: int = 0
    """Seed of the moments of failure."""
    out: Path | None = None
    """A file for the plot (.svg) or for a page with plot and tables (.html)."""


def command(words: list[str]) -> int:
    choice = choose(words, default="dlrm-v4")
    options = read_options(Options, choice, verb="plan", description=DESCRIPTION)
    counts = _ranks(options.ranks)
    price = _price(options.price)
    out = _require_out(options.out)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    config = _config(options)
    device = _device(options, terminal)
    network = network_of(
        options.network or ("loopback" if options.gpu == "cpu" else "ib400"), ranks_per_node=options.ranks_per_node
    )
    points = [_point(options, config, ranks, device, network, price) for ranks in counts]
    found = {
        "schema": 1,
        "workload": choice.workload.name,
        "preset": choice.preset,
        "device": device.name,
        "network": network.name,
        "currency": price[1] if price else None,
        "points": [plan_text.with_scaling(point, points[0]) for point in points],
    }
    text = plan_text.as_text(found)
    terminal.say(text)
    if out is not None:
        _write(out, found, text)
        terminal.say(f"\nkept in {out}")
    if options.json:
        print_json(found)
    return 0


def _point(
    options: Options[Any],
    config: Any,
    ranks: int,
    device: Device,
    network: Network,
    price: tuple[float, str] | None,
) -> dict[str, Any]:
    """Everything about one number of ranks, as plain values."""
    choices = _choices(options)
    ids, history = _skew(options, config, ranks, choices)
    found = predict(config, ranks, device, network, choices, skew=ids, history=history)
    told = plan_text.prediction(found, choices)
    mine = device.share(here(ranks, network))
    if not found.memory.fits:
        told["memory"]["remedies"] = [
            {"words": words, "bytes": memory.most, "apart_bytes": memory.apart}
            for words, memory in advice.remedies(found, choices, mine)
        ]
    if options.skew is not None:
        told["skew"] = plan_text.skew(
            advice.arrivals(
                found.work, found.skew, found.rank_batch, ranks, width=choices.column_width, wire=choices.wire
            ),
            advice.limits(found, choices, mine),
            ranks,
        )
    told["target"] = _target(options, config, found, price)
    told["failures"] = _failures(options, ranks, told["target"])
    return told


def _choices(options: Options[Any]) -> Choices:
    overrides: dict[str, Wish] = {}
    for entry in options.shard:
        name, equals, kind = entry.partition("=")
        if not equals:
            raise UsageError(f"--shard {entry!r} names no kind", fix="--shard album_id=column")
        overrides[name] = cast(Wish, kind)
    if options.rank_batch is not None and options.global_batch is not None:
        raise UsageError("--rank-batch and --global-batch exclude each other")
    return Choices(
        rank_batch=options.rank_batch,
        sharding=options.sharding,
        overrides=overrides,
        column_width=options.column_width,
        wire=options.a2a,
        codec=options.codec,
        dedup=options.dedup == "on",
        pipelined=options.pipeline == "on",
        overlapped=options.overlap == "on",
    )


def _skew(options: Options[Any], config: Any, ranks: int, choices: Choices) -> tuple[skew.Skew | None, float | None]:
    """The skew that was asked for, and the length of histories it comes with."""
    if options.skew is None:
        return None, options.history
    named, batch = skew.parse(options.skew), rank_batch_of(config, ranks, choices)
    work, hashed = work_of(config, history=options.history), options.ids == "hashed"
    if isinstance(named, float):
        return skew.zipf(work, batch, ranks, named, hashed=hashed), options.history
    found = skew.from_store(named, config, work, batch, ranks, hashed=hashed, batches=options.skew_batches)
    return found, found.mean_history if options.history is None else options.history


def _config(options: Options[Any]) -> Any:
    if options.global_batch is None:
        return options.values
    return replace(options.values, train=replace(options.values.train, batch_size=options.global_batch))


def _device(options: Options[Any], terminal: Terminal) -> Device:
    device = from_peaks(at_hand(terminal)) if options.gpu == "cpu" else device_of(options.gpu)
    if options.efficiency == 1.0:
        return device
    told = f"{device.efficiency.origin}; times {options.efficiency:g}, given"
    return replace(device, efficiency=device.efficiency.scaled(options.efficiency, told))


def _target(
    options: Options[Any], config: Any, found: Prediction, price: tuple[float, str] | None
) -> dict[str, Any] | None:
    samples = target.samples_to_target(config, found.global_batch, options.samples_to_target)
    if samples is None:
        return None
    hours = target.hours(samples.count, found.samples_per_s)
    return {
        "samples": samples.count,
        "origin": samples.origin,
        "hours": hours,
        "cost": target.cost(hours, found.ranks, price[0]) if price else None,
    }


def _failures(options: Options[Any], ranks: int, reached: dict[str, Any] | None) -> dict[str, Any] | None:
    if options.mtbf_hours is None:
        return None
    cluster = failures.Cluster(
        mtbf_s=failures.mtbf_of(options.mtbf_hours, ranks, options.mtbf_of),
        checkpoint_s=options.checkpoint_seconds,
        restart_s=options.restart_seconds,
        work_s=3600 * reached["hours"] if reached else 0.0,
        interval_s=options.interval_seconds,
    )
    return {
        "mtbf_s": cluster.mtbf_s,
        "checkpoint_s": cluster.checkpoint_s,
        "restart_s": cluster.restart_s,
        "work_s": cluster.work,
        "young_s": failures.young(cluster),
        "chosen": vars(failures.simulate(cluster, seed=options.failure_seed)),
        "best": vars(failures.best(cluster, seed=options.failure_seed)),
        "seeds": failures.SEEDS,
    }


def _ranks(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"--ranks {text!r} is no list of numbers", fix="--ranks 8, or --ranks 8,16,32")
    counts = [int(word) for word in words]
    for count in counts:
        within(1, count, 1 << 20, "ranks")
    return counts


def _price(text: str | None) -> tuple[float, str] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(EUR|USD)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"--price {text!r} is no price", fix="--price 2.5, --price 2.5EUR or --price 2.5USD")
    return float(found[1]), (found[2] or "").upper()


def _require_out(out: Path | None) -> Path | None:
    if out is not None and out.suffix not in (".svg", ".html"):
        raise UsageError(f"--out {out.name!r} is neither a plot nor a page", fix="--out plan.svg, or --out plan.html")
    return out


def _write(out: Path, found: dict[str, Any], text: str) -> None:
    from ..plan.plot import plot

    drawn = plot(found)
    if out.suffix == ".html":
        style = "body{font:15px system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}pre{overflow-x:auto}"
        title = f"recperf plan: {escape(found['workload'])} on {escape(found['device'])}"
        drawn = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
            f"<h1>{title}</h1>{drawn[drawn.index('<svg') :]}<pre>{escape(text)}</pre></html>\n"
        )
    write_atomic(out, drawn.encode())
