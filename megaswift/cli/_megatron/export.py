"""`megaswift export` under a path of ms-swift: `torchrun megaswift/cli/_megatron/export.py`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "export.py"), run_name="__main__")
