"""Low-rank adapters in PEFT's folders: which weights they belong to, reading, writing and merging."""
