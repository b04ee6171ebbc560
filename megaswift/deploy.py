"""`megaswift deploy`: a model behind OpenAI's HTTP API; without a token for local requests only."""

from __future__ import annotations

import copy
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaswift import log
from megaswift.base.byte_size import byte_size_or_none
from megaswift.compat.inference import InferenceToolkits
from megaswift.errors import ConfigError, Problem
from megaswift.folders.source import short_name, with_fetched_adapters
from megaswift.inference.options.checks import deploy_option_problems, server_auth_token
from megaswift.inference.options.commands import DeployConfig
from megaswift.inference.options.parser import CommandParser, ParsedCommand
from megaswift.inference.options.run_files import complete_deploy_options

if TYPE_CHECKING:
    from fastapi import FastAPI

    from megaswift.inference.pooling.folder import PoolingFolder
    from megaswift.serve.request_guard import AccessRules

USAGE = """\
megaswift deploy: serve an OpenAI-compatible API with transformers or vLLM

  megaswift deploy --model DIR            http://127.0.0.1:8000/v1, local requests only
  MEGASWIFT_API_KEY=... megaswift deploy --model DIR --host 0.0.0.0
  megaswift deploy --model EMBEDDER       /v1/embeddings, /v1/rerank, /v1/score, /classify, /pooling
  megaswift deploy --adapters law=OUT1/adapter code=OUT2/adapter    adapters by model name"""
TEXT_BODY = 8 << 20
"""Maximum bytes of a request to a text model, unless --max_body_size is given."""
IMAGES_BODY = 32 << 20
"""Maximum bytes of a request to a model that reads images, unless --max_body_size is given."""


def _complete(parsed: ParsedCommand) -> ParsedCommand:
    return complete_deploy_options(with_fetched_adapters(parsed, "weights"))


COMMAND = CommandParser("deploy", USAGE, DeployConfig, InferenceToolkits("deploy"), deploy_option_problems, _complete)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code, or raises a UserError."""
    return COMMAND.run(argv, _main)


def _main(cfg: DeployConfig) -> int:
    name = resolve_served_model_name(cfg)
    if name in (adapter for adapter, _ in cfg.weights.named_adapters):
        rule = "is also the name of the model itself"
        raise ConfigError(Problem(f"--adapters {name}=...", rule, "--served_model_name NAME, or another name"))
    return _vllm(cfg) if cfg.backend.infer_backend == "vllm" else _transformers(cfg)


def resolve_served_model_name(cfg: DeployConfig) -> str:
    """What clients call the model: the last part of its path, where that says something."""
    if cfg.server.served_model_name is not None:
        return cfg.server.served_model_name
    return short_name(str(cfg.weights.model))


def _also(cfg: DeployConfig) -> tuple[str, ...]:
    """Other names that clients may use: the words of --model, as vLLM's clients do."""
    return () if cfg.server.served_model_name is not None else (str(cfg.weights.model),)


def _rules(cfg: DeployConfig, secret: str | None, blind: bool) -> AccessRules:
    from megaswift.serve.request_guard import AccessRules

    body = TEXT_BODY if blind else IMAGES_BODY
    if cfg.server.max_body_size is not None:
        given = byte_size_or_none(cfg.server.max_body_size)
        body = given if given is not None else body
    return AccessRules(secret, body, cfg.server.host, log=cfg.server.log_requests)


def _listening(host: str, port: int) -> socket.socket:
    """The address is taken before torch is imported and the model is loaded, so that a port in use costs nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            Problem(
                f"--host {host} --port {port}",
                f"cannot listen on this address: {error.strerror or error}",
                "use --port 0 for any free port",
            )
        ) from None
    return listener


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _transformers(cfg: DeployConfig) -> int:
    from megaswift.inference.prechecks import locate_pooling_model, precheck_model, require_package

    for package in ("fastapi", "uvicorn"):
        require_package(package, "megaswift deploy")
    if (pooling := locate_pooling_model(cfg)) is not None:
        return _pooling(cfg, *pooling)
    precheck_model(cfg)  # before what follows imports torch
    listener = _listening(cfg.server.host, cfg.server.port)
    from megaswift.inference.adapters import selectable_adapters
    from megaswift.inference.chat_inputs import ChatInputRenderer
    from megaswift.inference.generator import Generator, generation_params
    from megaswift.inference.model import (
        load_config_tokenizer_and_processor,
        load_model_and_prompt_device,
    )

    talk = cfg.conversation
    prepared = load_config_tokenizer_and_processor(cfg.weights, talk.chat_template, talk.max_length)
    generation_params(cfg.generation, prepared.generation)  # tells at once what would be ignored
    model, device = load_model_and_prompt_device(prepared, cfg.placement)
    # The tokenizers library refuses to encode and decode with one tokenizer in two threads at a time.
    adapters = selectable_adapters(cfg.weights)
    generator = Generator(model, copy.deepcopy(prepared.tokenizer), device, adapters)
    from megaswift.serve.app import ServerState, build_app
    from megaswift.serve.request_queue import RequestQueue

    line = RequestQueue.before(generator, cfg.server.max_batch_size, cfg.server.max_waiting)
    prompts = ChatInputRenderer(prepared, cfg.conversation)
    name = resolve_served_model_name(cfg)
    writer = copy.deepcopy(prepared.tokenizer)
    served = ServerState(name, prompts, line, cfg.generation, prepared.generation, int(time.time()), writer, _also(cfg))
    served.adapters = (*adapters,)
    served.max_logprobs = cfg.server.max_logprobs
    served.owned_by = cfg.server.owned_by
    try:
        _serve(cfg, build_app(served), listener, bool(prompts.blind))
    finally:
        line.close()
        served.close()
    return 0


def _pooling(cfg: DeployConfig, folder: Path, found: PoolingFolder) -> int:
    """A server of vectors, scores or classes."""
    listener = _listening(cfg.server.host, cfg.server.port)
    from megaswift.data.model_tokenizer import read_tokenizer
    from megaswift.data.templates.chosen import read_system_message
    from megaswift.inference.pooling.model import load_pooling_model
    from megaswift.inference.pooling.texts import TextReader, context_of
    from megaswift.serve.pooling.app import PoolingState, build_pooling_app
    from megaswift.serve.request_queue import RequestQueue

    tokenizer = read_tokenizer(folder, cfg.weights.trust_remote_code, None)
    system = read_system_message(cfg.conversation.system) or ""
    reader = TextReader(tokenizer, found, context_of(folder), cfg.conversation.max_length, system)
    model = load_pooling_model(folder, cfg.weights, cfg.placement, cfg.pooling, found)
    line = RequestQueue(lambda inputs, _: model.run(inputs), cfg.server.max_batch_size, cfg.server.max_waiting)
    line.start()
    cuts = cfg.pooling.truncation_strategy == "right"
    served = PoolingState(resolve_served_model_name(cfg), reader, model.found, line, _also(cfg), cuts)
    served.owned_by = cfg.server.owned_by
    try:
        _serve(cfg, build_pooling_app(served), listener, blind=True)
    finally:
        line.close()
        served.close()
    return 0


def _serve(cfg: DeployConfig, app: FastAPI, listener: socket.socket, blind: bool) -> None:
    """Answers requests until the process is stopped."""
    import uvicorn

    from megaswift.serve.request_guard import RequestGuardMiddleware, http_protocol_with_limits

    secret = server_auth_token(cfg.server)
    application = RequestGuardMiddleware(app, _rules(cfg, secret, blind))
    host, port = listener.getsockname()[:2]
    log.info(
        f"serving {resolve_served_model_name(cfg)} at {_address(host, port)}"
        f" ({'token required' if secret else 'no token, local requests only'})"
    )
    try:
        settings = uvicorn.Config(
            application, http=http_protocol_with_limits(), ws="none", log_level="warning", access_log=False
        )
        uvicorn.Server(settings).run(sockets=[listener])
    except KeyboardInterrupt:  # how a server is ended
        log.info("stopped")


def _vllm(cfg: DeployConfig) -> int:
    from megaswift.folders.checkpoint import find_checkpoint
    from megaswift.folders.source import locate_model
    from megaswift.serve import vllm_server

    if unfit := vllm_server.missing_vllm_problems() or [*vllm_server.unsupported_option_problems(cfg)]:
        raise ConfigError(unfit)
    folder = locate_model(cfg.weights)
    if find_checkpoint(folder) is not None:
        raise ConfigError(
            Problem(
                f"--model {cfg.weights.model}",
                "is a training checkpoint; vLLM reads Hugging Face folders",
                f"megaswift convert megatron-to-hf {cfg.weights.model} DST",
            )
        )
    # a port in use is told now; 0 is any free one here too
    with _listening(cfg.server.host, cfg.server.port) as listener:
        host, port = listener.getsockname()[:2]
    words = vllm_server.server_command(cfg, folder, resolve_served_model_name(cfg), port)
    log.info(f"vLLM will serve {resolve_served_model_name(cfg)} at {_address(host, port)} once the model is loaded")
    sys.stderr.flush()
    # in this one's place: signals reach it
    os.execve(words[0], words, vllm_server.server_environment(os.environ, server_auth_token(cfg.server)))
