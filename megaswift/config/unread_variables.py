"""Environment variables of ms-swift that set sizes of images and videos: megaswift does not read them, and says so.

Owns their names and the line about them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SIZES = re.compile(
    r"(VIDEO_|IMAGE_)?(MAX|MIN|TOTAL)_(PIXELS|TOKEN_NUM)|VIDEO_TOTAL_PIXELS|FPS|FPS_(MAX|MIN)_FRAMES|NFRAMES|FRAME_FACTOR"
    r"|SIZE_FACTOR|IMAGE_FACTOR|SPATIAL_MERGE_SIZE|MAX_RATIO|(VIDEO_)?MAX_SLICE_NUMS|MAX_NUM_FRAMES|VIDEO_SEGMENTS"
    r"|VIDEO_MAX_NUM|QWENVL_BBOX_FORMAT"
)
"""Names of the variables."""


def unread_variables_notice(environ: Mapping[str, str]) -> str:
    """One line about those that are set; empty for none."""
    names = sorted(name for name in environ if SIZES.fullmatch(name))
    if not names:
        return ""
    one = len(names) == 1
    return (
        f"{', '.join(names)} (environment): {'is' if one else 'are'} not read; the model's preprocessor_config.json "
        "sets the sizes of images and videos"
    )
