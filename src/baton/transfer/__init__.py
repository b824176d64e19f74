"""Moving KV between workers: rooms, the lines between the two sides, and three ways for the bytes."""
