"""`megaswift bisect`: one optimizer step of a run against a reference, and the first tensor that differs."""
