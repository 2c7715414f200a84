"""Chooses how a runtime uses its device: profile, rooflines, one layer's graph, search."""
