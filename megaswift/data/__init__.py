"""From files of conversations or text to micro-batches: formats, chat templates, tokens on disk, packing, order,
loading."""
