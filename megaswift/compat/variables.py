"""Environment variables of ms-swift and its documents that megaswift does not read, and says so.

Owns their names and the lines about them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

OPTIONS = {
    "MAX_PIXELS": "max_pixels",
    "FPS": "video_fps",
    "FPS_MIN_FRAMES": "video_min_frames",
    "FPS_MAX_FRAMES": "video_max_frames",
    "VIDEO_MAX_PIXELS": "video_max_pixels",
    "INFONCE_TEMPERATURE": "infonce_temperature",
    "INFONCE_USE_BATCH": "infonce_use_batch",
    "INFONCE_HARD_NEGATIVES": "max_negatives",
    "MAX_NEGATIVE_SAMPLES": "max_negatives",
    "LISTWISE_RERANKER_TEMPERATURE": "listwise_temperature",
    "GENERATIVE_RERANKER_POSITIVE_TOKEN": "positive_token",
    "GENERATIVE_RERANKER_NEGATIVE_TOKEN": "negative_token",
}
"""Variables whose values are options here."""
SIZES = re.compile(
    r"(VIDEO_|IMAGE_)?(MAX|MIN|TOTAL)_(PIXELS|TOKEN_NUM)|VIDEO_TOTAL_PIXELS|FPS|FPS_(MAX|MIN)_FRAMES|NFRAMES|FRAME_FACTOR"
    r"|SIZE_FACTOR|IMAGE_FACTOR|SPATIAL_MERGE_SIZE|MAX_RATIO|(VIDEO_)?MAX_SLICE_NUMS|MAX_NUM_FRAMES|VIDEO_SEGMENTS"
    r"|VIDEO_MAX_NUM|QWENVL_BBOX_FORMAT"
)
OTHERS = (
    (SIZES, "the model's preprocessor_config.json sets the sizes of images and videos"),
    (re.compile("NCCL_TIMEOUT"), "neither NCCL nor PyTorch reads it either; --ddp_timeout SECONDS sets the timeout"),
    (
        re.compile("INFONCE_(MASK_FAKE_NEGATIVE|FAKE_NEG_MARGIN)"),
        "--infonce_false_negative_margin 0.1 leaves out negatives that are closer than the positive by more than 0.1",
    ),
    (
        re.compile("INFONCE_INCLUDE_(QQ|DD)"),
        "--infonce_directions query_to_doc query_to_query doc_to_doc adds these similarities",
    ),
    (
        re.compile("MAX_POSITIVE_SAMPLES|LISTWISE_RERANKER_MIN_GROUP_SIZE"),
        "all positives of a row are read, and lists without a negative have no loss",
    ),
    (re.compile("REASONING_EFFORT"), "the chat template's own default applies; --chat_template FILE.jinja changes it"),
    (re.compile("ASCEND_RT_VISIBLE_DEVICES"), "Ascend NPUs are not supported; CUDA_VISIBLE_DEVICES selects GPUs"),
)
"""Names of other variables, and what to say of them."""


def unread_variables_notices(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each kind of those that are set."""
    known = sorted(name for name in environ if name in OPTIONS)
    if known:
        yield _notice(known, "give " + " ".join(f"--{OPTIONS[name]} {environ[name]}" for name in known))
    for names, instead in OTHERS:
        found = sorted(name for name in environ if names.fullmatch(name) and name not in OPTIONS)
        if found:
            yield _notice(found, instead)


def _notice(found: Sequence[str], instead: str) -> str:
    return f"{', '.join(found)} (environment): {'is' if len(found) == 1 else 'are'} not read; {instead}"
