"""Seconds of collective calls, from bytes, links and the shape of the cluster.

Ranks on one node use the links of the device, ranks on different nodes use the network; both carry data at the same
time. An all-to-all sends to one node after the other, so latencies add up over nodes. An all-reduce first sums inside
each node, then between nodes, each rank its share, as trees do: latencies grow with the logarithm.

Shapes: R ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .devices import Device, Network


def ranks_on_node(ranks: int, network: Network) -> int:
    return min(ranks, network.ranks_per_node)


def node_count(ranks: int, network: Network) -> int:
    return -(-ranks // network.ranks_per_node)


def all_to_all(sent_R: NDArray[np.float64], received_R: NDArray[np.float64], device: Device, network: Network) -> float:
    """Time until the rank that sends or receives most is done; each rank's bytes go to all ranks in equal parts."""
    ranks = len(sent_R)
    if ranks == 1:
        return 0.0
    most = float(np.maximum(sent_R, received_R).max())
    near, nodes = ranks_on_node(ranks, network), node_count(ranks, network)
    inside = most * (near - 1) / ranks / (device.link_bytes_per_s * device.efficiency.link)
    outside = most * (ranks - near) / ranks / (network.bytes_per_s * device.efficiency.link)
    latency = (network.link_latency_s if near > 1 else 0.0) + (nodes - 1) * network.latency_s
    return max(inside, outside) + latency


def all_reduce(bytes_: float, ranks: int, device: Device, network: Network) -> float:
    """Time to sum that many bytes, which every rank has."""
    if ranks == 1:
        return 0.0
    near, nodes = ranks_on_node(ranks, network), node_count(ranks, network)
    share = device.efficiency.link
    inside = 2 * (near - 1) / near * bytes_ / (device.link_bytes_per_s * share)
    outside = 2 * (nodes - 1) / nodes * bytes_ / near / (network.bytes_per_s * share)
    inside_latency = 2 * math.ceil(math.log2(near)) * network.link_latency_s
    return inside + outside + inside_latency + 2 * math.ceil(math.log2(nodes)) * network.latency_s
