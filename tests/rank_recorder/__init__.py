"""Runs the code of single ranks of a large world and counts what they send, read and write.

Owns the recorder: process groups of torch's fake backend that count (`recording_group`), the counts (`record`), a run
of one rank (`run_rank`). Nothing here starts other ranks: what they would send is what this rank sends, or what rank 0
of the same world has broadcast when it was recorded.
"""
