"""`megaswift board [OUT ...]`: a web page of the runs below some folders."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
from pathlib import Path

from megaswift import log
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.errors import Problem, UserError, missing_path_hint

PORT = 7860
TOKEN = "MEGASWIFT_BOARD_TOKEN"
DESCRIPTION = """\
Show runs in the browser: a table of all runs below the folders, curves and completions of several runs side by side,
log, memory by part, checkpoints, configuration. On this machine's own address the page also starts, stops and resumes
runs below the folders, as background jobs, and chats with their models. Closing the page, the browser or the board
changes no run. Who has the token can do what you can do: keep it as you keep a password.
"""


def main(argv: list[str]) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    parser = UserErrorArgumentParser(prog="megaswift board", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", metavar="OUT", type=Path, nargs="*", help="folders of runs; default: the present one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}, or a free one if it is taken")
    parser.add_argument("--token", help=f"what the address must contain; default: {TOKEN}, or a random one")
    parser.add_argument(
        "--read_only", "--read-only", action="store_true", help="only show runs; always so with another --host"
    )
    given = parser.parse_args(argv)
    roots = given.runs or [Path()]
    problems = [Problem(str(p), "is not a folder", missing_path_hint(p)) for p in roots if not p.is_dir()]
    fixed = given.token or os.environ.get(TOKEN, "")
    if fixed and len(fixed) < 8:
        problems.append(
            Problem(f"--token or {TOKEN}", "is shorter than 8 characters", "leave it out: a random one is made")
        )
    if importlib.util.find_spec("gradio") is None:
        problems.append(Problem("megaswift board", "needs gradio", "pip install 'megaswift[board]'"))
    if problems:
        raise UserError(problems)
    token = fixed or secrets.token_urlsafe(24)
    listener = _listener(given.host, given.port)
    port = listener.getsockname()[1]
    local = given.host in ("127.0.0.1", "localhost", "::1")

    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it would report the start to its authors
    import uvicorn

    from megaswift.board.app import board_app

    read_only = given.read_only or not local  # without encryption the token of another host can be read on the way
    app = board_app([root.resolve() for root in roots], token, port, local, read_only)
    if not local and not given.read_only:
        log.info(
            "this board only reads: it starts runs with --host 127.0.0.1 (from elsewhere: ssh -L, docs/outputs.md)"
        )
    name = given.host if given.host not in ("0.0.0.0", "::") else socket.gethostname()
    listener.listen()  # who opens the address at once waits for the page
    print(f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={token}", flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", server_header=False)
    uvicorn.Server(settings).run(sockets=[listener])
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket; on any free port where the usual one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        if port != PORT:
            rule = f"cannot be listened on: {error.strerror}"
            raise UserError(Problem(f"--host {host} --port {port}", rule, "another --port")) from None
        listener.bind((host, 0))
    return listener
