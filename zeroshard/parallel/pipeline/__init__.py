"""Pipeline parallelism: a model is divided into runs of layers, and a batch into micro-batches."""
