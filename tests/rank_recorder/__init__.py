"""Runs the code of some ranks of a large world and counts what they send, read and write.

Owns the recorder: process groups that count (`recording_group`, `counted_gloo_group`), the counts (`record`), a run of
some ranks (`run_rank`), the runs that are recorded (`cases`). Ranks that are run exchange what they send; the others of
a group would send what this rank sends.
"""
