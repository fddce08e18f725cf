"""The draft worker: proposes tokens."""
