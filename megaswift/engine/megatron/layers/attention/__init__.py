"""Attention of the native engine's layers: by documents in torch, Transformer Engine's, latent, with rotation by position."""
