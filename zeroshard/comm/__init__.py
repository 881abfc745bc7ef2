"""Everything that talks to torch.distributed or knows of streams."""
