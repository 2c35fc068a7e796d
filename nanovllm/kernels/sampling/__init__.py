"""From logits to sampled tokens and log-probabilities."""
