"""Attention of the native engine's layers: by documents in torch, Transformer Engine's, latent, rotated by position."""
