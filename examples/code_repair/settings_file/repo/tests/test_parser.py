import unittest

from settings_file import Malformed, parse


class ParserTest(unittest.TestCase):
    def test_values_have_types(self):
        self.assertEqual(parse("[a]\nn = 3\nx = 0.5\nt = true\ns = hello world"), {"a": {"n": 3, "x": 0.5, "t": True, "s": "hello world"}})

    def test_comments_and_empty_lines_are_nothing(self):
        self.assertEqual(parse("# nothing\n\nn = 3 # three"), {"": {"n": 3}})

    def test_a_line_that_is_nothing_is_refused(self):
        with self.assertRaisesRegex(Malformed, "^line 2: "):
            parse("n = 3\nwhat")
