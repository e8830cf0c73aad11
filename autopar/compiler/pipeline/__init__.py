"""From a microbatched step to stages: phases, layers, tasks, and the order in which they run."""
