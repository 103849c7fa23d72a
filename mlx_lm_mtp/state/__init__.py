"""What is in the caches: snapshots, recording a forward, committing a prefix of it."""
