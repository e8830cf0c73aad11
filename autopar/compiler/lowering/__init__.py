"""From a plan to the executables and instructions of every mesh."""
