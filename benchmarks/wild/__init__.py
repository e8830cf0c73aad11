"""Train steps of released packages, tried as their users would: `make wild`."""
