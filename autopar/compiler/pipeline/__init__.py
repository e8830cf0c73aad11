"""Turn a microbatched step into stages: phases, layers, tasks, and the order in which they run."""
