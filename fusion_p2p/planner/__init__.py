"""OP-Fence: workload, network, simulator and planner. Pure: no torch, no sockets, no clock (DESIGN section 5)."""
