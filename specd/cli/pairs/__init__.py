"""The choice of a draft for a target, among the models on this machine: `--draft auto` and `specd pair`."""
