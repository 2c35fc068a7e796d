"""Matrix multiplication with a linear layer's weight, and the choice of kernel by shape."""
