"""`--deterministic`: what makes two runs of one command equal bit by bit, on both engines.

Owns the switches of torch and the variables of its libraries, and the words for what prevents it. Order of rows,
dropout and initial weights come from `--seed` with and without it; on a CPU nothing else is needed. torch is imported
when the switches are set.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from megaswift.errors import ConfigError, Problem

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree"),
    "FLASH_ATTENTION_DETERMINISTIC": ("1",),
}
"""Variable -> values with which sums are taken in one order; the first is set where there is none. cuBLAS and CUDA:
docs.nvidia.com/cuda/cublas (Results Reproducibility); Transformer Engine's attention; NCCL's sums in the switch (NVLS),
as in Megatron-Core's deterministic_mode; transformers' flash attention."""
_RAISED = "does not have a deterministic implementation"
"""In torch's error about such an operation."""


def determinism_environment_problems(deterministic: bool, environ: Mapping[str, str]) -> list[Problem]:
    """Return the environment variables whose values prevent deterministic runs."""
    if not deterministic:
        return []
    return [
        Problem(
            f"{name}={environ[name]}", f"conflicts with --deterministic, which needs {' or '.join(values)}", "unset it"
        )
        for name, values in VARIABLES.items()
        if name in environ and environ[name] not in values
    ]


def enable_determinism(deterministic: bool, environ: MutableMapping[str, str]) -> None:
    """Sets the variables, before a library reads them, and torch's switches. ConfigError where a variable prevents
    it."""
    if not deterministic:
        return
    if problems := determinism_environment_problems(deterministic, environ):
        raise ConfigError(problems)
    for name, values in VARIABLES.items():
        environ.setdefault(name, values[0])
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def nondeterministic_op_error(deterministic: bool, error: BaseException) -> ConfigError | None:
    """Return the error for a run that torch stopped because an operation has no deterministic form."""
    text = str(error)
    if not deterministic or _RAISED not in text:
        return None
    operation = text.split(_RAISED)[0].strip().split("\n")[-1]
    rule = f"{operation} has no deterministic implementation on this device, and this run uses it"
    return ConfigError(Problem("--deterministic true", rule, "--deterministic false"))
