"""Worlds, meshes and groups: launch, rendezvous, axes, topologies, derived groups."""
