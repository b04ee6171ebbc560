"""How the processes of a run are started: one launcher a file. They build commands; no torch is imported here."""
