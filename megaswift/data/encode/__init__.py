"""From rows to tokens and loss masks."""
