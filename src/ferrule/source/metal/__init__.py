"""MLX's Metal text, written and read."""
