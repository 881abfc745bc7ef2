"""Full parameters and their gradients, outside of forward and backward."""
