"""Arithmetic with working days."""

import datetime as dt

ONE_DAY = dt.timedelta(days=1)


def is_business_day(day, holidays=()):
    """Tell whether people are expected to work on a day."""
    return day.weekday() < 5 and day not in holidays


def next_business_day(day, holidays=()):
    """Return the first working day after the given one."""
    day += ONE_DAY
    while not is_business_day(day, holidays):
        day += ONE_DAY
    return day


def previous_business_day(day, holidays=()):
    """Return the last working day before the given one."""
    day -= ONE_DAY
    while not is_business_day(day, holidays):
        day -= ONE_DAY
    return day


def business_days_between(start, end, holidays=()):
    """Count the working days from start up to, but not including, end."""
    if end < start:
        return -business_days_between(end, start, holidays)
    count = 0