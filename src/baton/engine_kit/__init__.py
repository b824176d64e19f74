"""What engine adapters share: output stream, block hashes, shared memory, threads, C++ builds. Knows no engine."""
