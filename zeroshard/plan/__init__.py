"""The plan of sharding: values that are made before any memory is."""
