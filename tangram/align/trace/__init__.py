"""What a run computes for a batch, module by module under Hugging Face names, and where two such traces part."""
