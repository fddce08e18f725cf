"""Descriptors that validate the values assigned to attributes."""


class Validated:
    """Base class of the validating descriptors."""

    def __set_name__(self, owner, name):
        self.public_name = name
        self.private_name = "_" + name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        return getattr(instance, self.private_name)

    def __set__(self, instance, value):
        self.validate(value)
        setattr(instance, self.private_name, value)

    def validate(self, value):
        raise NotImplementedError


class Number(Validated):
    """Accept numbers within optional bounds."""

    def __init__(self, minimum=None, maximum=None):
        self.minimum = minimum
        self.maximum = maximum

    def validate(self, value):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{self.public_name} must be a number")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.public_name} must be at least {self.minimum}")
        if