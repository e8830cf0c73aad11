"""Turn a plan into the executables and instructions of every mesh."""
