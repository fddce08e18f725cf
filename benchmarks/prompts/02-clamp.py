import math


def clamp(value, low, high):
    """Limit value to the range from low to high."""