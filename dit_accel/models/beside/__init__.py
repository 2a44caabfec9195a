"""Other changes to a transformer: ControlNets, compilation, other caches, layers in 8 bits."""
