"""Engines that users run too: the local swarm, the emulated network, chaos."""
