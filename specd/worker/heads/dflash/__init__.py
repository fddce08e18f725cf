"""DFlash, DFlash 2 and DSpark: heads that draft a block of tokens in one pass."""
