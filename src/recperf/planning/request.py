"""What a user asks a plan for, and the plans that answer it: for `recperf plan` and `recperf.plan`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import within
from ..distributed.config import DistributedConfig
from ..errors import UsageError
from ..runs.report import page
from ..units import byte_count
from . import calibrate
from . import skew as skews
from .devices import Device, Network, device_of, network_of
from .report import report_of, side_by_side, summary
from .sharding import LARGEST_BATCH, Parallelism
from .summary import Plan, Question, Setting, plan
from .work import PlannedWorkload

Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request(Question):
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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A workload whose steps were counted, and how it is run."""

    name: str
    preset: str | None
    config: Any
    work: PlannedWorkload
    command: Callable[[str], str]
    """The `recperf run` of it, given the published data where no data is named."""
    has_data: bool = False
    """Whether the user named a dataset."""


def plans(request: Request, planned: Planned, notice: Notice) -> list[Plan]:
    """A plan for each device of the request."""
    counts = None if request.ranks is None else _ranks(request.ranks)
    if not hasattr(planned.config, "distributed"):
        if counts not in (None, [1]):
            raise UsageError(f"workload {planned.name!r} runs in a single process", fix="leave --ranks out")
        counts = [1]
    devices = list(dict.fromkeys(request.gpu.split(",")))
    prices = _prices(request.price, len(devices))
    if request.calibrate and len(devices) > 1:
        raise UsageError("--calibrate measures one device", fix="--gpu with a single device")
    work = planned.work
    if request.global_batch is not None:
        within(1, request.global_batch, LARGEST_BATCH, "global batch")
        work = replace(work, batch_size=request.global_batch)
    made = []
    for device, (price, currency) in zip(devices, prices):
        setting = _setting(replace(request, gpu=device), planned.config, work, price, notice)
        advised, points = plan(setting, counts)
        made.append(
            Plan(
                workload=planned.name,
                preset=planned.preset,
                command=planned.command("" if planned.has_data else work.published_data),
                device=setting.device.name,
                network=setting.network.name,
                currency=currency,
                advice=advised,
                points=points,
            )
        )
    return made


class PlanReport:
    """Plans as users of the Python API see them: printed, as a page, and in a notebook."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans
        """One for each device."""

    def __str__(self) -> str:
        from ..runs.report.blocks import render, render_sections

        if len(self.plans) > 1:
            return "\n".join(render_sections(side_by_side(self.plans))).strip()
        return render(reports_of(self.plans)[0])

    def page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the plans as one HTML file. With `force` it replaces a file that is not a page of recperf."""
        return page.write(html_of(self.plans), Path(path), force=force)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        return page.frame_of(html_of(self.plans))


def reports_of(plans: list[Plan]) -> list[Any]:
    return [replace(report_of(one, f"plan-{number}"), name=one.device) for number, one in enumerate(plans)]


def html_of(plans: list[Plan]) -> str:
    """The page of one plan, or of several side by side."""
    names = ", ".join(one.device for one in plans)
    return page.render(
        f"recperf plan: {plans[0].workload} on {names}",
        reports_of(plans),
        comparison=side_by_side(plans) if len(plans) > 1 else None,
        summary=summary(plans),
        kinds="plans",
    )


def _setting(options: Request, config: Any, workload: PlannedWorkload, price: float | None, notice: Notice) -> Setting:
    """Everything that the options say, except the number of ranks."""
    within(0.0, options.served or 0.0, 1.0, "served")
    within(0.0, options.startup_seconds or 0.0, 1e9, "startup seconds")
    if options.rank_batch is not None and options.global_batch is not None:
        raise UsageError("--rank-batch and --global-batch exclude each other")
    published = None if options.global_batch is not None else workload.rank_batch
    rank_batch = published if options.rank_batch is None else options.rank_batch
    # A workload that runs in a single process has no options of ranks.
    distributed = getattr(config, "distributed", DistributedConfig())
    device, network = _machine(options, workload, notice)
    tables, law = getattr(config, "tables", None), workload.popularity
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


def _skew(options: Request, workload: PlannedWorkload, batch: int, ranks: int) -> skews.Skew | None:
    """The ids of `batch` samples on each rank."""
    if options.skew == "even" or (options.skew is None and workload.popularity is None):
        return None
    work = workload.work(history=options.history)
    if options.skew is None and workload.popularity is not None:
        law = workload.popularity
        return skews.zipf(work, batch, ranks, law.exponent, repeated=law.repeated, source=f" ({law.origin})")
    return skews.zipf(work, batch, ranks, skews.parse(options.skew or ""))


def _machine(options: Request, workload: PlannedWorkload, notice: Notice) -> tuple[Device, Network]:
    """The planned device and its network, with the rates that were measured here, where they were."""
    work, name = workload.work(), options.gpu
    if options.calibrate:
        rates: calibrate.Calibration | None = calibrate.measure(work, workload.batch_size, notice)
        assert rates is not None
        if rates.device != name:
            later = f"later plans for it: --gpu {shlex.quote(rates.device)}"
            notice(f"planning for {rates.device}, the device at hand; {later}")
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
