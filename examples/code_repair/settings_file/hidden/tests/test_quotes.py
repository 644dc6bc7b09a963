import unittest

from settings_file import Malformed, parse


class QuotesTest(unittest.TestCase):
    def test_a_quoted_hash_is_no_comment(self):
        self.assertEqual(parse('name = "main # 1"   # the first'), {"": {"name": "main # 1"}})

    def test_quotes_make_text_of_anything(self):
        self.assertEqual(parse('a = "3"\nb = "true"\nc = ""'), {"": {"a": "3", "b": "true", "c": ""}})

    def test_a_backslash_lets_a_quote_be_part_of_the_text(self):
        self.assertEqual(parse(r'a = "say \"hi\" \\ # not a comment"'), {"": {"a": 'say "hi" \\ # not a comment'}})

    def test_a_quote_that_is_never_closed_is_refused(self):
        for text in ('a = "b', 'a = "b\\"', 'a = "'):
            with self.assertRaisesRegex(Malformed, "^line 1: "):
                parse(text)

    def test_what_follows_a_closing_quote_is_refused(self):
        with self.assertRaisesRegex(Malformed, "^line 2: "):
            parse('x = 1\na = "b" c')

    def test_false_is_false(self):
        self.assertIs(parse("a = false")[""]["a"], False)

    def test_a_value_may_have_an_equals_sign(self):
        self.assertEqual(parse("a = b=c"), {"": {"a": "b=c"}})

    def test_a_section_that_comes_back_goes_on(self):
        self.assertEqual(parse("[a]\nx = 1\n[b]\n[a]\ny = 2"), {"a": {"x": 1, "y": 2}, "b": {}})

    def test_a_section_is_closed(self):
        for text in ("[a", "[a] b"):
            with self.assertRaisesRegex(Malformed, "^line 1: "):
                parse(text)
