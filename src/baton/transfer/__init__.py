"""Moving KV between workers: rooms, the connections between their two sides, and the transports shm, nixl and tcp."""
