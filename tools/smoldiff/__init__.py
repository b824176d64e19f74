"""Trains smoldiff: a small masked-diffusion model that calculates, sorts, spells, reverses and counts."""
