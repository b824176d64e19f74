"""The processes of `baton serve`: which ones to start, and their supervision."""
