"""report.html: a self-contained page about a run, or about several runs side by side."""
