"""The private sides of torch and of objects: graphs, transforms, tracers, the values inside of objects."""
