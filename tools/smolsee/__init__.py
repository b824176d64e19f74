"""Trains smolsee: a vision tower and a connector for SmolLM2-135M, on synthetic pictures."""
