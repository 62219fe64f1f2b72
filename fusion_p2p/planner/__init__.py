"""OP-Fence: workload, network, simulator and planner. Pure: no torch, no sockets, no clock (DESIGN section 5)."""

from fusion_p2p.planner.explain import explain
from fusion_p2p.planner.ladder import DENSE, Ladder, Rung, default_ladder, top_k_ladder, uniform_top_k
from fusion_p2p.planner.network import AtomTimes, Device, Link, Network, from_measurements
from fusion_p2p.planner.proposal import Constraints, Proposal, plan
from fusion_p2p.planner.testbed import load_testbed, load_workload
from fusion_p2p.planner.workload import Workload, from_atoms

__all__ = [
    "DENSE",
    "AtomTimes",
    "Constraints",
    "Device",
    "Ladder",
    "Link",
    "Network",
    "Proposal",
    "Rung",
    "Workload",
    "default_ladder",
    "explain",
    "from_atoms",
    "from_measurements",
    "load_testbed",
    "load_workload",
    "plan",
    "top_k_ladder",
    "uniform_top_k",
]
