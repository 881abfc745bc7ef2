"""What torch and objects do not tell in public: graphs, transforms, trees, the values inside objects."""
