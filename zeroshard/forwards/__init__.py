"""What is put around a module's forward: compilation, recomputation, other methods."""
