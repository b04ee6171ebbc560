"""Engines hold a model, its gradients and its optimizer behind one interface (`protocol`): `megatron` and `torch`."""
