"""The parts of `scripts/bench_gpu.py`: the cases, the contenders, and the process of one case."""
