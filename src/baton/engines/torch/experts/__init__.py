"""Experts of the built-in engine: their physical slots, recording and rebalancing."""
