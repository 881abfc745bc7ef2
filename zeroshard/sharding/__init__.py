"""The core: who owns which element, and when parameters are gathered and gradients reduced."""
