"""`megaswift pt` under a path of ms-swift: `torchrun megaswift/cli/_megatron/pt.py`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "pt.py"), run_name="__main__")
