"""Simulates single ranks of a large run: the real engine and schedule, without weights and without the other ranks.

Owns what is recorded of a rank (`calls`), the process groups that record (`groups`), tensors without memory (`meta`), a
rank's step (`rank`), the comparison of ranks (`agreement`), the picture of the pipeline (`timeline`), and what
`megaswift simulate` prints (`report`).
"""
