"""The private sides of torch and of objects: graphs, transforms, trees, the values inside objects."""
