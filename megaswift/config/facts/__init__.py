"""What several options decide together, and the files that options name."""
