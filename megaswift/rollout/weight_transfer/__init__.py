"""Weights sent to sampling servers in buckets, through shared memory, CUDA IPC, gloo or NCCL."""
