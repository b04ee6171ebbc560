#!/bin/sh
# Entry point of the images. `docker run IMAGE sft run.yaml` runs megaswift's command; `docker run IMAGE bash -c "..."` any other program.
#
# megaswift runs where the first word is one of its commands, an option, or not the name of a program: it then reports the mistake.
# exec: signals of `docker stop` reach the program itself.
set -eu

case "${1:-}" in
  "" | -* | help | version | megatron) exec megaswift "$@" ;;
  pt | sft | rm | dpo | kto | orpo | simpo | cpo | grpo | ppo | gkd | rlhf | train) exec megaswift "$@" ;;
  embedding | reranker | generative_reranker | seq_cls | token_cls) exec megaswift "$@" ;;
  bisect | plan | simulate | config | data | convert | checkpoint | infer | deploy | eval | sample | export | migrate | submit | jobs | bench | doctor | report | board) exec megaswift "$@" ;;
esac
if command -v "$1" >/dev/null 2>&1; then
  exec "$@"
fi
exec megaswift "$@"
