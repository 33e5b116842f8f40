"""Proof that the split model is the Hugging Face model: one batch through both, loss, logits and every gradient compared by canonical name."""
