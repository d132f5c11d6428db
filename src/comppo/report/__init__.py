"""Turns saved run folders into one self-contained page. Reads records only: no torch, no model, no network."""
