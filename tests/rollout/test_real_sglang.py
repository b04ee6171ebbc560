"""SGLang itself, where it is installed: what it answers against transformers. `SGLANG_FLAGS` are more options of the
server.

    pip install sglang; pytest -m slow tests/rollout/test_real_sglang.py

On a CPU: SGLANG_USE_CPU_ENGINE=1 SGLANG_FLAGS="--device cpu --attention-backend torch_native --lora-backend
torch_native
--disable-cuda-graph --grammar-backend none --disable-overlap-schedule". docs/samplers.md says what else that needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

from megaswift.errors import ConfigError
from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.sampler import SamplerOptions as Options
from megaswift.rollout.sampler import SamplingParams, make_sampler
from megaswift.rollout.server_client import KEY, SamplingServer, ServerError
from tests.inference.models import adapters
from tests.rollout.real_servers import (
    PROMPTS,
    assert_continued,
    assert_on_policy,
    assert_same,
    assert_takes_weights,
    free_port,
    grpo,
    running,
    write_wide_model,
)
from tests.rollout.test_transformers import weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(util.find_spec("sglang") is None, reason="SGLang is not installed (pip install sglang)"),
]

GAP, TOKEN, ROOM = 1e-5, "a-token-of-the-tests", 94
BESIDE = (
    "--dtype",
    "float32",
    "--context-length",
    str(ROOM + 2),
    "--max-total-tokens",
    "4096",
    "--enable-deterministic-inference",
    *os.environ.get("SGLANG_FLAGS", "--attention-backend triton").split(),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang") / "tiny"
    write_wide_model(path)
    return path


@pytest.fixture(scope="module")
def plain_server(model: Path) -> Iterator[str]:
    """As docs/samplers.md starts it, with dummy weights."""
    command = ("sglang.launch_server", "--model-path", str(model), *BESIDE, "--load-format", "dummy")
    with running(command, free_port(), model.parent / "plain.log") as url:
        yield url


@pytest.fixture(scope="module")
def lora_server(model: Path) -> Iterator[str]:
    """The same for adapters alone, for those who have a token."""
    command = (
        "sglang.launch_server",
        "--model-path",
        str(model),
        *BESIDE,
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-target-modules",
        "all",
        "--api-key",
        TOKEN,
    )
    with running(command, free_port(), model.parent / "lora.log") as url:
        yield url


def test_a_server_takes_weights(plain_server: str, model: Path, tmp_path: Path) -> None:
    made = make_sampler(
        "sglang", model, Options(base_urls=(plain_server,), sync_folder=tmp_path / "sync", max_length=ROOM)
    )
    assert_takes_weights(made, model, GAP)
    long = [3, *[9] * 80]
    [cold] = made.generate([long], SamplingParams(ROOM - len(long), temperature=0), [1])
    assert len(cold.token_ids) == ROOM - len(long) and not cold.finished
    with pytest.raises(ServerError, match=f"cut off at {ROOM - len(long)} tokens; the limit is {ROOM - len(long) + 1}"):
        made.generate([long], SamplingParams(ROOM - len(long) + 1, temperature=0), [1])
    made.close()


def test_tokens_do_not_depend_on_their_company(plain_server: str, model: Path, tmp_path: Path) -> None:
    """Seeds of 63 bits, filters, and stop tokens at the end of what is finished and nowhere else."""
    made = make_sampler("sglang", model, Options(base_urls=(plain_server,), sync_folder=tmp_path / "sync"))
    made.update_weights(weights(model))
    prompts, seeds = PROMPTS * 8, range(2**63 - 24, 2**63)
    for how in (
        SamplingParams(16, stop_token_ids=(1, 7, 9)),
        SamplingParams(16, temperature=0.7, top_k=9, top_p=0.9, stop_token_ids=(1, 7, 9)),
    ):
        found = made.generate(prompts, how, seeds)
        alone = [made.generate([p], how, [s])[0] for p, s in zip(prompts[:6], seeds, strict=False)]
        assert [c.token_ids for c in found[:6]] == [c.token_ids for c in alone]
        assert len({c.token_ids for c in found}) > 16 and {c.finished for c in found} == {True, False}
        assert all((c.token_ids[-1] in {1, 7, 9}) == c.finished and not {1, 7, 9} & {*c.token_ids[:-1]} for c in found)
    made.close()


def test_what_would_harm_a_server_is_not_asked(plain_server: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"context length is {ROOM}.* {ROOM + 1} tokens"):
        make_sampler("sglang", model, Options(base_urls=(plain_server,), sync_folder=tmp_path, max_length=ROOM + 1))
    with pytest.raises(ConfigError, match="LoRA is not enabled"):
        make_sampler("sglang", model, Options(base_urls=(plain_server,), lora_rank=4))
    made = make_sampler("sglang", model, Options(base_urls=(plain_server,), sync_folder=tmp_path))
    with pytest.raises(ConfigError, match="--min_p 0.1: is not supported with deterministic"):
        made.generate(PROMPTS, SamplingParams(4, min_p=0.1), range(3))
    with pytest.raises(ServerError, match="must be the same folder on its machine"):
        made.load(SamplingServer(plain_server, 60, "SGLang", ""), tmp_path / "nowhere")  # type: ignore[attr-defined]


def test_a_run_is_sampled_with_all_weights(plain_server: str, model: Path, tmp_path: Path) -> None:
    run = ("--rollout_backend", "sglang", "--rollout_server_url", plain_server, "--train_type", "full")
    assert_on_policy(grpo(model, tmp_path, *run), GAP)


def test_completions_go_on_with_new_weights(plain_server: str, tmp_path: Path) -> None:
    """Of a model of the same shapes, whose completions are long."""
    model = tmp_path / "model"
    write_wide_model(model, ends=False)
    run = ("--rollout_backend", "sglang", "--rollout_server_url", plain_server)
    assert_continued(model, tmp_path, GAP, ROOM, *run)


def test_a_server_takes_adapters_alone(
    lora_server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match=f"responded with 401.*\n    try: set {KEY}="):
        make_sampler("sglang", model, Options(base_urls=(lora_server,), lora_rank=4))
    monkeypatch.setenv(KEY, TOKEN)
    made, alone = (
        make_sampler("sglang", model, Options(base_urls=(lora_server,), lora_rank=4)),
        build(model, Options(lora_rank=4)),
    )
    for seed in (5, 6):
        for sampler in (made, alone):
            sampler.update_adapter(adapters(tmp_path / f"{seed}", model, seed))
        assert_same(made, alone, GAP)


def test_a_run_is_sampled_with_adapters_alone(
    lora_server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, TOKEN)
    run = (
        "--rollout_backend",
        "sglang",
        "--rollout_server_url",
        lora_server,
        "--train_type",
        "lora",
        "--rollout_lora",
        "true",
    )
    assert_on_policy(grpo(model, tmp_path, *run), GAP)
