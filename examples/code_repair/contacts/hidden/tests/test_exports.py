from contacts import read, write


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    (tmp_path / "book.csv").write_bytes("\ufeffname,city\r\nZo\u00eb,K\u00f6ln\r\n".encode())
    assert read(tmp_path / "book.csv") == [{"name": "Zo\u00eb", "city": "K\u00f6ln"}]


def test_windows_1252_is_understood(tmp_path):
    (tmp_path / "book.csv").write_bytes("name,price\r\nRen\u00e9,5 \u20ac\r\n".encode("cp1252"))
    assert read(tmp_path / "book.csv") == [{"name": "Ren\u00e9", "price": "5 \u20ac"}]


def test_a_line_break_inside_of_a_field_is_kept(tmp_path):
    people = [{"name": "Ada", "address": "1 Main St\nLondon"}, {"name": "Bob", "address": "next\u2028door"}]
    write(tmp_path / "book.csv", people)
    assert read(tmp_path / "book.csv") == people


def test_utf_8_still_is_utf_8(tmp_path):
    people = [{"name": "\u7530\u4e2d", "city": "\u6771\u4eac"}]
    write(tmp_path / "book.csv", people)
    assert read(tmp_path / "book.csv") == people
