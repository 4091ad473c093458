"""Networks between nodes, and seconds of collective calls from bytes, links and the shape of the cluster.

Ranks on one node use the links of the device, ranks on different nodes use the network; both carry data at the same
time. An all-to-all sends to one node after the other, so latencies add up over nodes. An all-reduce first sums inside
each node, then between nodes, each rank its share, as trees do: latencies grow with the logarithm.

Shapes: R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..config import from_json, within
from .devices import FILE, GB, Device, read_file


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between nodes, for each rank; inside a node the links of the device are used."""

    name: str = "ib400"
    """Name in plans."""
    bytes_per_s: float = 50 * GB
    """Bandwidth of one rank to other nodes, one direction."""
    latency_s: float = 10e-6
    """Latency of a message to another node."""
    link_latency_s: float = 5e-6
    """Latency of a message inside a node."""
    ranks_per_node: int = 8
    """Ranks on a node."""
    origin: str = "stated in the file"
    """Source of the figures."""

    def __post_init__(self) -> None:
        within(1e3, self.bytes_per_s, 1e16, "network.bytes_per_s")
        for name in ("latency_s", "link_latency_s"):
            within(0.0, getattr(self, name), 60.0, f"network.{name}")
        within(1, self.ranks_per_node, 1 << 16, "network.ranks_per_node")


NETWORKS = {
    name: from_json(Network, {"name": name, **fields}, field="network") for name, fields in FILE["network"].items()
}


def network_of(name: str, *, ranks_per_node: int | None = None) -> Network:
    """A known network, or the one that a JSON file describes."""
    network = NETWORKS[name] if name in NETWORKS else read_file(Network, name, set(NETWORKS), "network")
    return network if ranks_per_node is None else replace(network, ranks_per_node=ranks_per_node)


def node_count(ranks: int, network: Network) -> int:
    return -(-ranks // network.ranks_per_node)


def fullest_and_emptiest(ranks: int, network: Network) -> tuple[int, int]:
    """Ranks on the fullest node and on the last one, which has what the full ones leave."""
    full = min(ranks, network.ranks_per_node)
    return full, ranks - (node_count(ranks, network) - 1) * full


def all_to_all(sent_R: NDArray[np.float64], received_R: NDArray[np.float64], device: Device, network: Network) -> float:
    """Time until the rank that sends or receives most is done; each rank's bytes go to all ranks in equal parts."""
    ranks = len(sent_R)
    if ranks == 1:
        return 0.0
    most = float(np.maximum(sent_R, received_R).max())
    full, last = fullest_and_emptiest(ranks, network)
    inside = most * (full - 1) / ranks / (device.link_bytes_per_s * device.efficiency.link)
    outside = most * (ranks - last) / ranks / (network.bytes_per_s * device.efficiency.link)
    latency = (network.link_latency_s if full > 1 else 0.0) + (node_count(ranks, network) - 1) * network.latency_s
    return max(inside, outside) + latency


def all_reduce(bytes_: float, ranks: int, device: Device, network: Network) -> float:
    """Time to sum that many bytes, which every rank has. The ranks of the emptiest node have the largest shares."""
    if ranks == 1:
        return 0.0
    (full, last), nodes = fullest_and_emptiest(ranks, network), node_count(ranks, network)
    share = device.efficiency.link
    inside = 2 * (full - 1) / full * bytes_ / (device.link_bytes_per_s * share)
    outside = 2 * (nodes - 1) / nodes * bytes_ / last / (network.bytes_per_s * share)
    inside_latency = 2 * math.ceil(math.log2(full)) * network.link_latency_s
    return inside + outside + inside_latency + 2 * math.ceil(math.log2(nodes)) * network.latency_s
