"""What is sharded how: values that are made before any memory is."""
