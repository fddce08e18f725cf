"""Tests for the containers in collections_plus."""

import copy
import pickle
import unittest

from collections_plus import BoundedStack, EmptyError, FullError, Stack


class StackTest(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()

    def test_new_stack_is_empty(self):
        self.assertEqual(len(self.stack), 0)
        self.assertFalse(self.stack)

    def test_push_one(self):
        self.stack.push(1)
        self.assertEqual(len(self.stack), 1)
        self.assertEqual(self.stack.peek(), 1)

    def test_push_two(self):
        self.stack.push(1)
        self.stack.push(2)
        self.assertEqual(len(self.stack), 2)
        self.assertEqual(self.stack.peek(), 2)

    def test_pop_returns_last_value(self):
        self.stack.push("a")
        self.stack.push("b")
        self.assertEqual(self.stack.pop(), "b")
        self.assertEqual(self.stack.pop(), "a")

    def test_pop_empty(self):
        with self.assertRaises(EmptyError):
            self.stack.pop()

    def test_peek_empty(self):
        with self.assertRaises(EmptyError):
            self.stack.peek()

    def test_clear(self):
        self.stack.push(1)
        self.stack.clear()
        self.assertEqual(len(self.stack), 0)

    def test_iterates_from_top(self):
        for value in range(4):
            self.stack.push(value)
        self.assertEqual(list(self.stack), [3, 2, 1, 0])

    def test_contains(self):
        self.stack.push("x")
        self.assertIn("x", self.stack)
        self.assertNotIn("y", self.stack)

    def test_equality(self):
        other = Stack()
        self.assertEqual(self.stack, other)
        other.push(1)
        self.assertNotEqual(self.stack, other)
        self.stack.push(1)
        self.assertEqual(self.stack, other)

    def test_repr(self):
        self.assertEqual(repr(self.stack), "Stack([])")
        self.stack.push(1)
        self.assertEqual(repr(self.stack), "Stack([1])")

    def test_copy(self):
        self.stack.push([1])
        shallow = copy.copy(self.stack)
        deep = copy.deepcopy(self.stack)
        self.assertIs(shallow.peek(), self.stack.peek())
        self.assertIsNot(deep.peek(), self.stack.peek())

    def test_pickle(self):
        self.stack.push(1)
        self.stack.push(2)
        data = pickle.dumps(self.stack)
        self.assertEqual(pickle.loads(data), self.stack)


class BoundedStackTest(unittest.TestCase):
    def setUp(self):
        self.stack = BoundedStack(2)

    def test_push_until_full(self):
        self.stack.push(1)
        self.stack.push(2)
        self.assertTrue(self.stack.is_full())

    def test_push_full(self):
        self.stack.push(1)
        self.stack.push(2)
        with