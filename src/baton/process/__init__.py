"""The processes: worker, frontend and global router, from start to exit code."""
