"""Colours, overlays, map alignment and figure sheets."""
