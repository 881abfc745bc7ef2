"""The parts of asynchronous pipelines that know kinds of optimizers."""
