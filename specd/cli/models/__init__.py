"""The commands `specd models list`, `show`, `pull` and `rm`."""
