"""recperf plan WORKLOAD --gpu DEVICE"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from ..config import within
from ..distributed.config import DistributedConfig
from ..errors import UsageError
from ..plan import calibrate
from ..plan import skew as skews
from ..plan.devices import Device, Network, device_of, network_of
from ..plan.report import report_of, side_by_side, summary
from ..plan.sharding import LARGEST_BATCH, Parallelism
from ..plan.summary import Plan, Question, Setting, plan
from ..plan.work import PlannedWorkload
from ..runs.report import page
from ..runs.report.blocks import render_sections
from ..units import byte_count
from .options import C, Choice, SourceOptions, WorkloadOptions, choose, read_options
from .parse import ForceOption, VerboseOption
from .terminal import Terminal, print_json

DESCRIPTION = """Say how many devices a workload needs, how long it trains to its quality target and what that costs.
The fields of the config can be set too."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SourceOptions, Question, VerboseOption, ForceOption):
    ranks: str | None = None
    """Number of devices, or several numbers: 8,16,32. Default: 1, 2, 4 and so on, up to some that fit."""
    gpu: str = "h200"
    """Device: h200, h100, h20, a100, l40s, b200, b300, gb200, gb300, mi300x, mi325x, mi350x, mi355x, or a JSON file;
    several, as in h200,b200, side by side."""
    calibrate: bool = False
    """Time products, attention and copies at the model's shapes on the GPU of this machine, how fast its host calls
    operators and, with two GPUs, messages between them; plan for that GPU. Later plans of the same model use the
    figures."""
    network: str | None = None
    """Network between nodes: ib200, ib400, ib800, eth25, or a JSON file. Default: ib400."""
    global_batch: int | None = None
    """Samples of a step on all ranks together. Default: the batch size of the config; for the published sizes of
    dlrm-v4, 1,024 on each rank, or a published global batch where these do not fit."""
    rank_batch: int | None = None
    """Samples of a step on one rank, instead of a global batch."""
    history: float | None = None
    """Mean number of events in a history (dlrm-v4). Default: the published share of the maximum."""
    skew: str | None = None
    """Popularity of ids: zipf:1.05 or even. Default: as published for the data of dlrm-v4, else even."""
    price: str | None = None
    """Price of one device for an hour: 2.5, 2.5EUR or 2.5USD; of several devices, one for all or one for each."""
    out: Path | None = None
    """Write the plan with all its tables as a page to this file (.html)."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C], PlanOptions):
    """With the fields of the workload's config."""


def command(arguments: list[str]) -> int:
    choice = choose(arguments, default="dlrm-v4", planning=True)
    options = read_options(Options, choice, verb="plan", description=DESCRIPTION)
    counts = None if options.ranks is None else _ranks(options.ranks)
    if not hasattr(options.values, "distributed"):
        if counts not in (None, [1]):
            raise UsageError(f"workload {choice.workload.name!r} runs in a single process", fix="leave --ranks out")
        counts = [1]
    devices = list(dict.fromkeys(options.gpu.split(",")))
    prices = _prices(options.price, len(devices))
    if options.calibrate and len(devices) > 1:
        raise UsageError("--calibrate measures one device", fix="--gpu with a single device")
    if options.out is not None:
        page.place_of(options.out, force=options.force)
    terminal = Terminal(as_json=options.json, quiet=options.quiet, verbose=options.verbose)
    workload = choice.workload.planned(options.values)
    if options.global_batch is not None:
        within(1, options.global_batch, LARGEST_BATCH, "global batch")
        workload = replace(workload, batch_size=options.global_batch)
    plans = [
        _plan(replace(options, gpu=device), choice, workload, price, counts, terminal)
        for device, price in zip(devices, prices)
    ]
    _show(plans, options, terminal)
    if options.json:
        print_json(to_builtins(plans[0] if len(plans) == 1 else {"plans": plans}))
    return 0


def _plan(
    options: Options[Any],
    choice: Choice,
    workload: PlannedWorkload,
    price: tuple[float | None, str | None],
    counts: list[int] | None,
    terminal: Terminal,
) -> Plan:
    """The plan for one device."""
    setting = _setting(options, workload, price[0], terminal)
    advised, points = plan(setting, counts)
    return Plan(
        workload=choice.workload.name,
        preset=choice.preset,
        command=_run_command(choice, "" if "--data" in choice.sources else workload.published_data),
        device=setting.device.name,
        network=setting.network.name,
        currency=price[1],
        advice=advised,
        points=points,
    )


def _show(plans: list[Plan], options: Options[Any], terminal: Terminal) -> None:
    """Print the plan, or several side by side, and write its page."""
    reports = [replace(report_of(one, f"plan-{number}"), name=one.device) for number, one in enumerate(plans)]
    first, several = plans[0], len(plans) > 1
    if several:
        terminal.say("\n".join(render_sections(side_by_side(plans))).strip())
        for one in reports if options.verbose else []:
            terminal.show(one)
    else:
        terminal.show(reports[0])
    if options.out is not None:
        names = ", ".join(one.device for one in plans)
        html = page.render(
            f"recperf plan: {first.workload} on {names}",
            reports,
            comparison=side_by_side(plans) if several else None,
            summary=summary(plans),
            kinds="plans",
        )
        terminal.facts(("page", str(page.write(html, options.out, force=options.force))))


def _setting(options: Options[Any], workload: PlannedWorkload, price: float | None, terminal: Terminal) -> Setting:
    """Everything that the options say, except the number of ranks."""
    within(0.0, options.served or 0.0, 1.0, "served")
    within(0.0, options.startup_seconds or 0.0, 1e9, "startup seconds")
    if options.rank_batch is not None and options.global_batch is not None:
        raise UsageError("--rank-batch and --global-batch exclude each other")
    published = None if options.global_batch is not None else workload.rank_batch
    rank_batch = published if options.rank_batch is None else options.rank_batch
    # A workload that runs in a single process has no options of ranks.
    distributed = getattr(options.values, "distributed", DistributedConfig())
    device, network = _machine(options, workload, terminal)
    tables, law = getattr(options.values, "tables", None), workload.popularity
    repeated = options.skew is None and law is not None and law.repeated
    return Setting(
        workload=workload,
        device=device,
        network=network,
        parallelism=Parallelism(**vars(distributed), rank_batch=rank_batch),
        question=options,
        skew=partial(_skew, options, workload),
        global_batches=() if options.rank_batch or options.global_batch else tuple(workload.published_samples),
        history=options.history,
        price=price,
        cache_bytes=byte_count(tables.device_bytes) if tables else None,
        tiered=tables is not None and tables.placement in ("host", "file"),
        # The usual ids without repetitions within a batch, where they have some.
        worse_skew=partial(_skew, replace(options, skew=f"zipf:{law.exponent}"), workload)
        if law and repeated
        else None,
    )


def _run_command(choice: Choice, data: str) -> str:
    """The `recperf run` of this config on a dataset, without what the plan decides."""
    fields: list[str] = []
    rest = list(choice.rest)
    while rest:
        flag = rest.pop(0)
        values = list(takewhile(lambda value: not value.startswith("--"), rest))
        del rest[: len(values)]
        # Options of the plan itself have no dot.
        if "." in flag.partition("=")[0] and not flag.startswith("--train.batch-size"):
            fields += [flag, *values]
    return shlex.join(["run", choice.workload.name, *choice.sources, *(("--data", data) if data else ()), *fields])


def _skew(options: Options[Any], workload: PlannedWorkload, batch: int, ranks: int) -> skews.Skew | None:
    """The ids of `batch` samples on each rank."""
    if options.skew == "even" or (options.skew is None and workload.popularity is None):
        return None
    work = workload.work(history=options.history)
    if options.skew is None and workload.popularity is not None:
        law = workload.popularity
        return skews.zipf(work, batch, ranks, law.exponent, repeated=law.repeated, source=f" ({law.origin})")
    return skews.zipf(work, batch, ranks, skews.parse(options.skew or ""))


def _machine(options: Options[Any], workload: PlannedWorkload, terminal: Terminal) -> tuple[Device, Network]:
    """The planned device and its network, with the rates that were measured here, where they were."""
    work, name = workload.work(), options.gpu
    if options.calibrate:
        rates: calibrate.Calibration | None = calibrate.measure(work, workload.batch_size, terminal.notice)
        assert rates is not None
        if rates.device != name:
            later = f"later plans for it: --gpu {shlex.quote(rates.device)}"
            terminal.notice(f"planning for {rates.device}, the device at hand; {later}")
        name = rates.device
    else:
        rates = calibrate.stored(name, work)
    network = network_of(options.network or "ib400")
    if rates is None:
        return device_of(name), network
    return rates.applied(calibrate.measured_device(rates), work.precision), rates.connected(network)


def _ranks(text: str) -> list[int]:
    numbers = text.replace(",", " ").split()
    counts = sorted({int(number) for number in numbers if re.fullmatch(r"[0-9]{1,7}", number)})
    if not numbers or len(counts) < len(set(numbers)) or counts[0] < 1 or counts[-1] > 1 << 20:
        raise UsageError(
            f"--ranks {text!r} is not a list of numbers from 1 to {1 << 20:,}", fix="--ranks 8, or --ranks 8,16,32"
        )
    return counts


def _prices(text: str | None, devices: int) -> list[tuple[float | None, str | None]]:
    """A price and its currency for each device."""
    prices: list[tuple[float | None, str | None]] = []
    for one in text.split(",") if text else ():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(EUR|USD)?", one.strip(), re.IGNORECASE)
        if match is None:
            raise UsageError(f"--price {one!r} is not a price", fix="--price 2.5, --price 2.5EUR or --price 2.5USD")
        prices.append((float(match[1]), (match[2] or "").upper()))
    prices = prices or [(None, None)]
    if len({currency for _, currency in prices}) > 1:
        raise UsageError(f"--price {text!r} has two currencies", fix="one currency for all devices")
    if len(prices) not in (1, devices):
        raise UsageError(f"--price has {len(prices)} prices for {devices} devices", fix="one for all, or one for each")
    return prices if len(prices) == devices else devices * prices
