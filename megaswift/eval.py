"""`megaswift eval`: scores of a model on tasks of lm-evaluation-harness and files of questions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift import log
from megaswift.compat.inference import InferenceToolkits
from megaswift.data.templates.chosen import check_template, read_system_message
from megaswift.diagnosis.installed import installed_version
from megaswift.errors import ConfigError, Problem
from megaswift.evaluation.options.checks import complete_eval_options, eval_option_problems, server_token
from megaswift.evaluation.options.evaluation import SERVER, EvaluationCommandConfig
from megaswift.folders.source import locate_model, short_name, with_fetched_adapters
from megaswift.inference.openai_server import first_served_model
from megaswift.inference.options.parser import CommandParser, ParsedCommand
from megaswift.inference.prechecks import locate_generation_model, require_package
from megaswift.version import __version__

if TYPE_CHECKING:
    from megaswift.evaluation.harness import HarnessRun
    from megaswift.evaluation.results import EvaluationResult

USAGE = """\
megaswift eval: scores on tasks of lm-evaluation-harness, task files and files of questions

  megaswift eval --model DIR --tasks arc_easy hellaswag --limit 100
  megaswift eval --adapters OUT/adapter --tasks my_task.yaml questions.jsonl
  megaswift eval --model DIR --tasks questions.jsonl --baseline eval_output/BASE
  megaswift eval --base_url http://127.0.0.1:8000/v1 --model DIR --tasks arc_easy"""
PACKAGES = ("lm_eval", "tenacity", "aiohttp")
"""What the extra `eval` installs, as modules."""
PAGE = "results.html"


def _complete(parsed: ParsedCommand) -> ParsedCommand:
    return complete_eval_options(with_fetched_adapters(parsed, "weights"))


COMMAND = CommandParser(
    "eval", USAGE, EvaluationCommandConfig, InferenceToolkits("eval"), eval_option_problems, _complete
)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    return COMMAND.run(argv, _main)


def require_harness(why: str) -> None:
    """ConfigError where lm-evaluation-harness is missing."""
    try:
        for package in PACKAGES:
            require_package(package, why)
    except ConfigError as error:
        what = error.problems[0]
        raise ConfigError(Problem(what.what, what.rule, "run pip install 'megaswift[eval]'")) from None


def _main(cfg: EvaluationCommandConfig) -> int:
    # What can be wrong without torch: packages, the baseline, the prompt's texts, the model's folder, the server.
    require_harness("megaswift eval")
    from megaswift.evaluation.results import read_result

    baseline = None if cfg.output.baseline is None else read_result(cfg.output.baseline)
    if cfg.prompt.chat_template is not None:
        check_template(cfg.prompt.chat_template)
    system = read_system_message(cfg.prompt.system)
    if cfg.backend.infer_backend == SERVER:
        lm, tasks, name = _on_server(cfg)
    else:
        locate_generation_model(cfg.weights)
        lm, tasks, name = _here(cfg)

    # The tasks, and the scores.
    from megaswift.evaluation import harness

    run = _harness_run(cfg, system)
    began = time.monotonic()
    found = harness.run_tasks(lm, tasks, run)
    settings = _settings(cfg, found, time.monotonic() - began)
    result = harness.result_of(name, found, run, settings)
    _write(cfg, result, found, baseline)
    return 0


def _harness_run(cfg: EvaluationCommandConfig, system: str | None) -> HarnessRun:
    """How the tasks run, from the options."""
    from megaswift.evaluation.harness import HarnessRun

    prompt = cfg.prompt
    arguments: dict[str, Any] = {name: _plain(text) for name, text in prompt.gen_kwargs.items()}
    if prompt.max_new_tokens is not None:
        arguments["max_gen_toks"] = prompt.max_new_tokens
    if prompt.temperature is not None:
        arguments |= {"temperature": prompt.temperature, "do_sample": prompt.temperature > 0}
    limit = cfg.task.limit
    return HarnessRun(
        num_fewshot=cfg.task.num_fewshot,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        batch_size=cfg.task.batch_size,
        seed=cfg.task.seed,
        apply_chat_template=bool(prompt.apply_chat_template),
        fewshot_as_multiturn=prompt.fewshot_as_multiturn,
        system=system or None,
        gen_kwargs=arguments,
        confirm_run_unsafe_code=cfg.task.confirm_run_unsafe_code,
        bootstrap_iters=cfg.output.bootstrap_iters,
    )


def _plain(text: str) -> Any:
    """The value of a JSON text; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _here(cfg: EvaluationCommandConfig) -> tuple[Any, Any, str]:
    """The model in this process, the tasks, and the model's name. Tasks are read before weights."""
    from megaswift.evaluation import harness
    from megaswift.evaluation.task_library import load_tasks
    from megaswift.inference.model import load_config_tokenizer_and_processor, load_model_and_prompt_device

    prepared = load_config_tokenizer_and_processor(cfg.weights, cfg.prompt.chat_template, cfg.prompt.max_length)
    chat = _uses_template(cfg, bool(prepared.tokenizer.chat_template))
    tasks = load_tasks(cfg.task.tasks, cfg.task.include_path, chat)
    model, _ = load_model_and_prompt_device(prepared, cfg.placement)
    how: dict[str, Any] = {"max_length": cfg.prompt.max_length, "think_end_token": cfg.prompt.think_end_token}
    if cfg.prompt.enable_thinking is not None:
        how["enable_thinking"] = cfg.prompt.enable_thinking
    lm = harness.local_model(model, prepared.tokenizer, cfg.task.batch_size, **how)
    return lm, tasks, short_name(next(iter(cfg.weights.adapter_folders), str(cfg.weights.model)))


def _on_server(cfg: EvaluationCommandConfig) -> tuple[Any, Any, str]:
    """The model behind --base_url, the tasks, and the model's name."""
    token = server_token(cfg.backend)
    address = str(cfg.backend.base_url).rstrip("/")
    name = cfg.backend.served_model_name or first_served_model(address, token)
    folder = None if cfg.weights.model is None else locate_model(cfg.weights, weights=False)
    from megaswift.data.model_tokenizer import read_tokenizer
    from megaswift.evaluation import harness
    from megaswift.evaluation.task_library import load_tasks
    from megaswift.inference.model import quiet_transformers

    quiet_transformers()
    tokenizer = None
    if folder is not None:
        tokenizer = read_tokenizer(folder, cfg.weights.trust_remote_code, cfg.prompt.chat_template)
    chat = _uses_template(cfg, tokenizer is None or bool(tokenizer.chat_template))
    tasks = load_tasks(cfg.task.tasks, cfg.task.include_path, chat)
    how: dict[str, Any] = {"num_concurrent": cfg.backend.num_concurrent, "seed": cfg.task.seed}
    lm = harness.server_model(address, name, folder, token, cfg.task.batch_size, **how)
    if tokenizer is not None:
        lm.tokenizer = tokenizer
    return lm, tasks, name


def _uses_template(cfg: EvaluationCommandConfig, has_template: bool) -> bool:
    """Whether files of questions go into the chat template."""
    if cfg.prompt.apply_chat_template and not has_template:
        fix = "give --chat_template FILE.jinja, or leave it out"
        raise ConfigError(Problem("--apply_chat_template true", "the tokenizer has no chat template", fix))
    return has_template if cfg.prompt.apply_chat_template is None else cfg.prompt.apply_chat_template


def _settings(cfg: EvaluationCommandConfig, found: Any, seconds: float) -> dict[str, Any]:
    """Versions and options that a reader of the scores needs."""
    import torch

    where = cfg.backend.base_url or ("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "model": cfg.weights.model,
        "adapters": list(cfg.weights.adapters),
        "tasks": list(cfg.task.tasks),
        "where": where,
        "num_fewshot": cfg.task.num_fewshot,
        "limit": cfg.task.limit,
        "batch_size": cfg.task.batch_size,
        "apply_chat_template": cfg.prompt.apply_chat_template,
        "seed": cfg.task.seed,
        "seconds": round(seconds, 1),
        "megaswift": __version__,
        **{name: installed_version(name) for name in ("lm_eval", "torch", "transformers")},
        "task_versions": {task: str(version) for task, version in found.get("versions", {}).items()},
    }


def _write(cfg: EvaluationCommandConfig, result: EvaluationResult, found: Any, baseline: Any) -> None:
    """Write the results, and print the tables."""
    from megaswift.evaluation import results
    from megaswift.evaluation.harness import write_samples
    from megaswift.run.report.scores import write_scores_page

    folder = Path(str(cfg.output.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    samples = found.get("samples", {}) if cfg.output.log_samples else {}
    if samples:
        write_samples(folder, found)
    compared = []
    if baseline is not None:
        compared = results.differences(result, baseline, cfg.output.bootstrap_iters, cfg.task.seed)
        if not compared:
            log.warn(f"--baseline {cfg.output.baseline} has no question in common with these tasks")
    write_scores_page(folder / PAGE, result, compared, "" if baseline is None else baseline.model, samples)
    path = result.write(folder)
    print(results.table_text(results.score_rows(result.scores)))
    if compared:
        print(f"\ncompared with {baseline.model}:")
        print(results.table_text(results.difference_rows(compared)))
    log.print_result(f"wrote {path} and {folder / PAGE}")
