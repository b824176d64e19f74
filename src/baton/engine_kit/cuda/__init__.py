"""GPU memory without torch: regions that keep their address, that other processes map, and copies of their blocks."""
