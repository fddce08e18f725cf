class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y =