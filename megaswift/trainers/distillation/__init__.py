"""Distillation: a teacher beside the model that trains, and on-policy batches."""
