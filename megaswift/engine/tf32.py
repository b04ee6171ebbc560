"""`--tf32`: whether products of float32 matrices are rounded to TF32 on a GPU, on both engines.

Owns torch's switch and what prevents it. torch is imported where the option is set only.
"""

from __future__ import annotations

from megaswift.errors import Problem

AMPERE = 8
"""Major compute capability of the first GPUs with TF32."""


def tf32_problems(tf32: bool | None, dtype: str, transformer_engine: bool) -> list[Problem]:
    """Return problems of `--tf32`: a device without TF32, or modules that always use it.

    Args:
        tf32: `--tf32`; None: nothing is asked for.
        dtype: The dtype of the weights on a GPU.
        transformer_engine: Whether the layers may be Transformer Engine's.
    """
    if tf32 is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return [Problem("--tf32 true", "there is no CUDA device", "leave it out")] if tf32 else []
    major = torch.cuda.get_device_capability()[0]
    if tf32 and major < AMPERE:
        rule = f"needs a GPU of compute capability {AMPERE}.0 or later, and this one has {major}"
        return [Problem("--tf32 true", rule, "leave it out")]
    # its products are CUBLAS_COMPUTE_32F_FAST_TF32: transformer_engine/common/gemm/cublaslt_gemm.cu
    if not tf32 and transformer_engine and dtype == "float32" and major >= AMPERE:
        rule = "Transformer Engine always rounds products of float32 matrices to TF32"
        return [Problem("--tf32 false", rule, "--transformer_impl torch")]
    return []


def set_tf32(tf32: bool | None) -> None:
    """Set torch's switches for products and convolutions; None leaves them as they are."""
    if tf32 is not None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
