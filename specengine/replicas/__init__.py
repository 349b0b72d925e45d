"""Several engines side by side, each in a process of its own: how one is loaded, and the cluster that they run on."""
