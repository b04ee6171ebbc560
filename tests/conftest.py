"""What every test may use: one thread a process, no hub, and a tiny tokenizer with tiny models of each family, made on the spot."""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
