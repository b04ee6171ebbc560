"""What a run measures and records of its devices and ranks: times, connections, checksums, collectives in flight."""
