"""Environment variables of ms-swift and its documents that megaswift does not read, and says so.

Owns their names and the lines about them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

SIZES = re.compile(
    r"(VIDEO_|IMAGE_)?(MAX|MIN|TOTAL)_(PIXELS|TOKEN_NUM)|VIDEO_TOTAL_PIXELS|FPS|FPS_(MAX|MIN)_FRAMES|NFRAMES|FRAME_FACTOR"
    r"|SIZE_FACTOR|IMAGE_FACTOR|SPATIAL_MERGE_SIZE|MAX_RATIO|(VIDEO_)?MAX_SLICE_NUMS|MAX_NUM_FRAMES|VIDEO_SEGMENTS"
    r"|VIDEO_MAX_NUM|QWENVL_BBOX_FORMAT"
)
OTHERS = (
    (SIZES, "the model's preprocessor_config.json sets the sizes of images and videos"),
    (re.compile("NCCL_TIMEOUT"), "neither NCCL nor PyTorch reads it either; --ddp_timeout SECONDS sets the timeout"),
    (re.compile("ASCEND_RT_VISIBLE_DEVICES"), "Ascend NPUs are not supported; CUDA_VISIBLE_DEVICES selects GPUs"),
)
"""Names of variables, and what to say of them."""


def unread_variables_notices(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each kind of those that are set."""
    for names, instead in OTHERS:
        found = sorted(name for name in environ if names.fullmatch(name))
        if found:
            verb = "is" if len(found) == 1 else "are"
            yield f"{', '.join(found)} (environment): {verb} not read; {instead}"
