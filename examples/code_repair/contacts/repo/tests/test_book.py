from contacts import read, write


def test_what_is_written_is_read(tmp_path):
    people = [{"name": "Ada", "city": "London"}, {"name": "Zo\u00eb", "city": "K\u00f6ln"}]
    write(tmp_path / "book.csv", people)
    assert read(tmp_path / "book.csv") == people


def test_a_file_without_contacts_has_none(tmp_path):
    (tmp_path / "book.csv").write_text("name,city\n")
    assert read(tmp_path / "book.csv") == []
