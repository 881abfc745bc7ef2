"""What torch and objects do not tell in public: graphs, transforms, tracers, the values inside of objects."""
