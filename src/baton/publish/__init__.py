"""What a worker tells the outside: metrics here, KV events and load for the router."""
