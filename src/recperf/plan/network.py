"""Seconds of collective calls, from bytes, links and the shape of the cluster.

Ranks of a node reach each other by the device's links, others by the network; both carry at the same time. An
all-to-all sends to one node after the other, so that latencies add up over nodes. An all-reduce sums inside nodes
first, then between them, each rank its share, as trees do: latencies grow with the logarithm.

Shapes: R ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .devices import Device, Network


def here(ranks: int, network: Network) -> int:
    """Ranks of a node."""
    return min(ranks, network.ranks_per_node)


def nodes(ranks: int, network: Network) -> int:
    return -(-ranks // network.ranks_per_node)


def all_to_all(sent_R: NDArray[np.float64], received_R: NDArray[np.float64], device: Device, network: Network) -> float:
    """Until the rank that sends or receives most is done; every rank's bytes go evenly to all."""
    ranks = len(sent_R)
    if ranks == 1:
        return 0.0
    most = float(np.maximum(sent_R, received_R).max())
    near, many = here(ranks, network), nodes(ranks, network)
    inside = most * (near - 1) / ranks / (device.link_bytes_per_s * device.efficiency.link)
    outside = most * (ranks - near) / ranks / (network.bytes_per_s * device.efficiency.link)
    waits = (network.link_latency_s if near > 1 else 0.0) + (many - 1) * network.latency_s
    return max(inside, outside) + waits


def all_reduce(bytes_: float, ranks: int, device: Device, network: Network) -> float:
    """Of as many bytes on every rank."""
    if ranks == 1:
        return 0.0
    near, many = here(ranks, network), nodes(ranks, network)
    share = device.efficiency.link
    inside = 2 * (near - 1) / near * bytes_ / (device.link_bytes_per_s * share)
    outside = 2 * (many - 1) / many * bytes_ / near / (network.bytes_per_s * share)
    waits = 2 * math.ceil(math.log2(near)) * network.link_latency_s + 2 * math.ceil(math.log2(many)) * network.latency_s
    return inside + outside + waits
