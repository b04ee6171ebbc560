"""Options of ms-swift, vLLM and transformers for `infer`, `deploy` and `export` that those commands do not have.

Owns, by command, which of them are accepted because they ask for what happens anyway, and what replaces the others.
Names that only differ in spelling are aliases on the options.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaswift.compat.names.absent import ANY, EITHER, OFF, ON
from megaswift.compat.names.neutral import NeutralOption
from megaswift.compat.names.translated import PRECISIONS

_ROWS = NeutralOption(EITHER, "rows are read once, before the model is loaded")
_ONE_READER = NeutralOption(ANY, "rows are read once, before the model is loaded")
_ORDER = NeutralOption(OFF, "results have the order of the file", "leave it out")
_ONE_PROCESS = NeutralOption(ANY, "one process does the work")
_TASK = NeutralOption(
    ("causal_lm",), "the model generates text", "megaswift infer or deploy, for embeddings, scores and classes"
)
_LABELS = "leave it out: config.json of the classifier has its labels"
_CALIBRATION = NeutralOption(ANY, "only --dataset has calibration rows, of which every token counts")
_TRAINING = NeutralOption(ANY, "it applies to training only")
_IN_MEMORY = NeutralOption(ANY, "adapters are merged in memory")
_SERVER = NeutralOption(ANY, "a server reads no data")
_NO_TEXT = NeutralOption(ANY, "export generates no text")
_NO_ROWS = NeutralOption(ANY, "--tasks names the questions")
_CHECKED = NeutralOption(EITHER, "model files are checked before they are read")

_ALL: dict[str, NeutralOption] = {
    "check_model": _CHECKED,
    "ddp_backend": NeutralOption(("gloo", "nccl"), "processes exchange results over gloo", "leave it out"),
    "lazy_tokenize": _ROWS,
    "load_args": NeutralOption(EITHER, "the adapter folder names its base model"),
    "load_from_cache_file": _ROWS,
    **dict.fromkeys(PRECISIONS, NeutralOption(OFF, "--torch_dtype sets the precision")),
    "vllm_max_lora_rank": NeutralOption(ANY, "it follows the adapters' rank"),
    "vllm_enable_lora": NeutralOption(EITHER, "vLLM applies adapters where --adapters are given"),
    "padding_side": NeutralOption(("left",), "prompts are padded on the left", "leave it out"),
    "use_chat_template": NeutralOption(ON, "conversations use the chat template", 'rows of {"text": ...} are plain'),
    "remove_unused_columns": NeutralOption(EITHER, "columns of a row are kept in its result"),
    "tuner_backend": NeutralOption(("peft",), "adapters have PEFT's format", "leave it out"),
    "use_swift_lora": NeutralOption(OFF, "adapters have PEFT's format", "leave it out"),
    "enable_npu_model_patch": NeutralOption(OFF, "no models are patched", "leave it out"),
    "ignore_args_error": NeutralOption(OFF, "unknown options are errors", "leave it out"),
    "template_backend": NeutralOption(
        ("jinja",), "conversations use the tokenizer's chat template", "--chat_template FILE.jinja"
    ),
    **dict.fromkeys(("data_seed", "packing", "packing_num_proc", "packing_length", "streaming"), _TRAINING),
    **dict.fromkeys(("shuffle_buffer_size", "stopping_strategy", "loss_scale", "is_binary_loss_scale"), _TRAINING),
    **dict.fromkeys(("sequence_parallel_size", "init_strategy"), _TRAINING),
    "bnb_4bit_compute_dtype": NeutralOption(ANY, "products are computed in --torch_dtype"),
}
_INFER = {
    **_ALL,
    "max_shard_size": _IN_MEMORY,
    "vllm_use_async_engine": NeutralOption(OFF, "vLLM gets all rows at once", "megaswift deploy, for a server"),
    "write_batch_size": NeutralOption(ANY, "answers are written to RESULT.partial after each batch"),
    "dataset_num_proc": _ONE_READER,
    "dataloader_num_workers": _ONE_READER,
    "strict": NeutralOption(ON, "a row that cannot be used is an error", "correct the row"),
    "dataset_shuffle": _ORDER,
    "val_dataset_shuffle": _ORDER,
    "split_dataset_ratio": NeutralOption(("0", "0.0"), "every row of --val_dataset is answered", "leave it out"),
    "log_level": NeutralOption(("info",), "messages have one level", "leave it out"),
}
_DEPLOY = {
    **_ALL,
    "ddp_timeout": _ONE_PROCESS,
    "max_shard_size": _IN_MEMORY,
    **dict.fromkeys(("dataset", "val_dataset", "load_data_args", "split_dataset_ratio", "dataset_num_proc"), _SERVER),
    **dict.fromkeys(("dataset_shuffle", "val_dataset_sample", "columns", "strict", "result_path"), _SERVER),
    **dict.fromkeys(("write_batch_size", "metric"), _SERVER),
    "vllm_use_async_engine": NeutralOption(ON, "vLLM's server has an asynchronous engine", "leave it out"),
    "log_interval": NeutralOption(ANY, "each request is logged with its duration"),
    "log_level": NeutralOption(("info",), "messages have one level", "--log_requests false"),
    "stream": NeutralOption(EITHER, "each request chooses streaming"),
    "disable_log_requests": NeutralOption(OFF, "requests are logged", "--log_requests false"),
}
_EXPORT = {
    **_ALL,
    "task_type": NeutralOption(ANY, "config.json has the model's head"),
    "ddp_timeout": _ONE_PROCESS,
    "val_dataset": _CALIBRATION,
    "load_data_args": _CALIBRATION,
    "split_dataset_ratio": _CALIBRATION,
    "dataset_num_proc": _ONE_PROCESS,
    "template_mode": _CALIBRATION,
    "truncation_strategy": NeutralOption(ANY, "calibration rows are joined and cut into sequences of --max_length"),
    "loss_scale": _CALIBRATION,
    "dataset_shuffle": NeutralOption(ANY, "calibration rows are shuffled with --seed"),
    **dict.fromkeys(("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams"), _NO_TEXT),
    **dict.fromkeys(("stream", "stop_words", "logprobs", "top_logprobs"), _NO_TEXT),
    **dict.fromkeys(("response_prefix", "max_model_len"), _NO_TEXT),
    "attn_impl": NeutralOption(ANY, "no attention is computed"),
    "to_peft_format": NeutralOption(EITHER, "adapters always have PEFT's format"),
    "exist_ok": NeutralOption(OFF, "existing folders are never overwritten", "remove the folder first"),
    "device_map": NeutralOption(ANY, "weights are placed automatically"),
    "thread_count": NeutralOption(ANY, "--max_shard_size sets the size of files"),
    "save_missing_weights": NeutralOption(ON, "every tensor of the source is written", "leave it out"),
    "test_convert_dtype": NeutralOption(ANY, "--test_convert_precision true compares stored values bit by bit"),
    "to_cached_dataset": NeutralOption(
        OFF,
        "export writes models; true, on the command line, writes a cached data set",
        "--to_cached_dataset true on the command line",
    ),
    "to_ollama": NeutralOption(
        OFF,
        "export writes Hugging Face folders, which Ollama reads",
        "write a Modelfile with the line FROM DIR, then run ollama create NAME -f Modelfile",
    ),
    "linear_decoupled_in_proj": NeutralOption(EITHER, "tensors are written as the Hugging Face model has them"),
    "mtp_num_layers": NeutralOption(ANY, "tensors of multi-token prediction layers are kept unchanged"),
    "async_save": NeutralOption(EITHER, "the command returns when everything is written"),
    "sequence_parallel": NeutralOption(EITHER, "files do not depend on it"),
}
_EVAL = {
    **{name: option for name, option in _ALL.items() if name != "use_chat_template"},  # a spelling of one of its own
    "task_type": _TASK,
    "ddp_timeout": _ONE_PROCESS,
    "eval_backend": NeutralOption(
        ("native", "lm_eval", "lm-eval"),
        "lm-evaluation-harness runs the tasks",
        "evalscope eval --api-url http://127.0.0.1:8000/v1 against megaswift deploy (docs/evaluation.md)",
    ),
    "eval_num_proc": NeutralOption(ANY, "questions are asked in batches, and --num_concurrent at a time of a server"),
    "verbose": NeutralOption(EITHER, "the table of scores is printed at the end"),
    "local_dataset": NeutralOption(OFF, "files of this machine are named by --tasks", "--tasks FILE"),
    "stream": NeutralOption(EITHER, "answers are scored when they are complete"),
    "load_data_args": NeutralOption(EITHER, "--tasks names the data"),
    "max_shard_size": _IN_MEMORY,
    **dict.fromkeys(("val_dataset", "split_dataset_ratio", "dataset_num_proc", "dataset_shuffle", "strict"), _NO_ROWS),
    "log_level": NeutralOption(("info",), "messages have one level", "leave it out"),
}
_SAMPLE = {
    **_ALL,
    "task_type": _TASK,
    "sampler_type": NeutralOption(
        ("sample", "distill"),
        "completions are sampled, from a server with --base_url",
        "--num_return_sequences N: no trees are searched",
    ),
    "sampler_engine": NeutralOption(
        ("none",),
        "it is --infer_backend here",
        "--base_url URL for a server, or leave it out",
    ),
    "resume": NeutralOption(EITHER, "the same command goes on where it stopped"),
    "stream": NeutralOption(EITHER, "completions are scored when they are complete"),
    "load_data_args": NeutralOption(EITHER, "--dataset names the prompts"),
    "dataset_num_proc": _ONE_READER,
    "dataloader_num_workers": _ONE_READER,
    "dataset_shuffle": _ORDER,
    "val_dataset_shuffle": _ORDER,
    "strict": NeutralOption(ON, "a row that cannot be used is an error", "correct the row"),
    "split_dataset_ratio": NeutralOption(("0", "0.0"), "every row of --dataset is sampled", "leave it out"),
    "max_shard_size": _IN_MEMORY,
    "vllm_use_async_engine": NeutralOption(OFF, "vLLM gets a batch at once", "leave it out"),
    "log_level": NeutralOption(("info",), "messages have one level", "leave it out"),
}
NEUTRAL_OF: Mapping[str, Mapping[str, NeutralOption]] = {
    "infer": _INFER,
    "deploy": _DEPLOY,
    "export": _EXPORT,
    "eval": _EVAL,
    "sample": _SAMPLE,
}
"""Command -> its neutral options."""

_TEMPLATE = "--chat_template FILE.jinja; unset: the tokenizer's template"
_TEMPLATE_FILE = "leave it out: the chat template of the model folder formats the reasoning"
_TLS = "leave it out: use a reverse proxy for TLS"
_HUB = "--push_to_hub true with --hub_model_id, --hub_token and --hub_private_repo"
_TOKEN = "set the environment variable HF_TOKEN"
_SERVED = "give it to the server: megaswift deploy --infer_backend vllm ..., then --base_url http://127.0.0.1:8000/v1"
_OTHER_SERVER = "start that server itself: python -m sglang.launch_server, or lmdeploy serve api_server"

_HINTS: dict[str, str] = {
    "hqq_axis": "--quantization_bit 4, by bitsandbytes",
    "bnb_4bit_quant_storage": "leave it out: packed weights are stored as bytes",
    "model_kwargs": "set the value in the model's config.json or preprocessor_config.json",
    "norm_bbox": "leave it out: coordinates in rows are not rescaled",
    "download_mode": "leave it out: a downloaded data set is reused",
    "custom_dataset_info": "leave it out: give data as files",
    "cached_dataset": "leave it out: give the data files themselves",
    "cached_val_dataset": "leave it out: give the data files themselves",
    "model_name": "leave it out: replace {{NAME}} in the rows",
    "model_author": "leave it out: replace {{AUTHOR}} in the rows",
    "disable_auto_column_mapping": "leave it out: only known column names are read",
    "preserve_thinking": _TEMPLATE_FILE,
    "add_non_thinking_prefix": _TEMPLATE_FILE,
    "disable_ignore_empty_think": _TEMPLATE_FILE,
    "structured_outputs_regex": "send it with each request to a vLLM server",
    "num_labels": _LABELS,
    "problem_type": _LABELS,
    "reranker_use_activation": "leave it out: requests have use_activation",
    "use_ms": "--use_hf false",
    "max_pixels": "set max_pixels in the model's preprocessor_config.json",
    "external_plugins": "leave it out: no code of yours runs in this command",
    "custom_register_path": "leave it out: --trust_remote_code true runs the code in the model folder",
    "tuner_type": "leave it out: the adapter folder has its type",
    "train_type": "leave it out: the adapter folder has its type",
    "sft_type": "leave it out: the adapter folder has its type",
}
_GENERATION = {
    **_HINTS,
    "hub_token": _TOKEN,
    "hf_token": _TOKEN,
    "response_prefix": _TEMPLATE,
    "do_sample": "--temperature: above 0 samples, 0 is greedy",
}
HINTS_OF: Mapping[str, Mapping[str, str]] = {
    "infer": {
        **_GENERATION,
        "ckpt_dir": "--adapters DIR, or --model DIR for a whole model",
        "output_dir": "--result_path FILE",
        "metric": "compare `response` and `labels` in the result file",
        "val_dataset_sample": "--val_dataset FILE#N",
        "prompt": "type it in the terminal, or pipe it: echo TEXT | megaswift infer --model DIR",
        "eval_human": "leave out --val_dataset to chat in the terminal",
    },
    "deploy": {
        **_GENERATION,
        "ckpt_dir": "--adapters DIR, or --model DIR for a whole model",
        "api_keys": "--api_key",
        "backend": "--infer_backend",
        "lora_modules": "--adapters NAME=DIR",
        "enable_lora": "--adapters NAME=DIR",
        "ssl_keyfile": _TLS,
        "ssl_certfile": _TLS,
        "root_path": "leave it out: use a reverse proxy",
    },
    "eval": {
        **_HINTS,
        "ckpt_dir": "--adapters DIR, or --model DIR for a whole model",
        "hub_token": _TOKEN,
        "hf_token": _TOKEN,
        "eval_dataset_args": "write a task file with few-shot examples, subsets and splits (docs/evaluation.md)",
        "extra_eval_args": "--gen_kwargs, --num_fewshot and --limit",
        "custom_eval_config": "--tasks FILE.jsonl, or a task file of lm-evaluation-harness",
        "do_sample": "--temperature: above 0 samples, 0 is greedy",
        "metric": "the task sets its metrics",
        "result_path": "--output_dir DIR",
        "host": "--base_url URL of a server that runs",
        "port": "--base_url URL of a server that runs",
        "top_p": "--gen_kwargs top_p=P",
        "top_k": "--gen_kwargs top_k=K",
        "repetition_penalty": "--gen_kwargs repetition_penalty=X",
        "stop_words": "--gen_kwargs until=TEXT",
    },
    "sample": {
        **{name: hint for name, hint in _HINTS.items() if name not in ("external_plugins", "custom_register_path")},
        "ckpt_dir": "--adapters DIR, or --model DIR for a whole model",
        "hub_token": _TOKEN,
        "hf_token": _TOKEN,
        "output_dir": "--result_path DIR/FILE.jsonl",
        "num_sampling_batches": "--dataset FILE#N samples the first N rows",
        "data_range": "--dataset FILE#N samples the first N rows",
        "override_exist_file": "remove the file, or use another --result_path",
        "cache_files": "the same command goes on where it stopped, with other options of the selection too",
        "engine_kwargs": "--vllm_engine_kwargs, or the options of vLLM",
        "do_sample": "--temperature: above 0 samples",
        "truncation_strategy": "leave it out: prompts are not cut; longer ones than the context are errors",
        "response_prefix": _TEMPLATE,
    },
    "export": {
        **_HINTS,
        "rope_scaling": "set rope_scaling in the model's config.json",
        "new_special_tokens": "leave it out: the tokenizer of the model folder has them",
        "merge_adapters": "--merge_lora true",
        "to_gguf": "convert the folder with llama.cpp: python convert_hf_to_gguf.py DIR",
        "quantization_method": "--quant_method",
        "ckpt_dir": "--adapters DIR",
        "hub_strategy": "leave it out: the folder is uploaded once, when it is complete",
        "fp8_recipe": "--quant_method fp8 writes weights in FP8; the others describe training",
        "fp8_format": "--quant_method fp8 writes weights in FP8; the others describe training",
        "fp8_param_gather": "--quant_method fp8 writes weights in FP8; the others describe training",
    },
}
"""Command -> option of another toolkit -> what to do in place of it."""
_CALIBRATE = (
    "megaswift export --quant_method {0} --quant_bits 4 --dataset FILE writes such a folder, which --model DIR loads"
)
VALUES_ELSEWHERE_OF_INFERENCE: Mapping[tuple[str, str], str] = {
    ("infer_backend", "vllm"): "megaswift deploy --infer_backend vllm, then megaswift eval --base_url "
    "http://127.0.0.1:8000/v1",
    ("infer_backend", "sglang"): "--infer_backend vllm, or start SGLang's own server: python -m sglang.launch_server",
    ("infer_backend", "lmdeploy"): "--infer_backend vllm, or start LMDeploy's own server: lmdeploy serve api_server",
    ("quant_method", "awq"): _CALIBRATE.format("awq"),
    ("quant_method", "fp8"): "megaswift export --quant_method fp8 writes such a folder, which --model DIR loads",
    ("quant_method", "gptq"): _CALIBRATE.format("gptq"),
    ("quant_method", "gptq_v2"): _CALIBRATE.format("gptq"),
}
"""What to say in place of another toolkit's value of an option."""
PATTERNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"(sglang|lmdeploy)_\w+", _OTHER_SERVER, ("infer", "deploy")),
    (r"vllm_\w+", "--vllm_engine_kwargs '{\"NAME\": VALUE}', with vLLM's own name", ("infer", "deploy")),
    (r"hub_\w+", _HUB, ("export",)),
    (r"(vllm|sglang|lmdeploy)_\w+", _SERVED, ("eval",)),
)
"""Whole families of names, and the commands whose users give them."""
EVALUATION_TASKS: Mapping[str, str] = {
    "arc": "ai2_arc",
    "arc_c": "arc_challenge",
    "arc_e": "arc_easy",
    "ceval": "ceval-valid",
    "competition_math": "hendrycks_math",
    "gpqa_diamond": "gpqa_diamond_zeroshot",
    "math_500": "minerva_math500",
    "trivia_qa": "triviaqa",
    "truthful_qa": "truthfulqa_mc2",
}
"""EvalScope's names of benchmarks -> tasks of lm-evaluation-harness on the same questions."""
