from cart import Cart, Line


def test_two_carts_share_nothing():
    first, second = Cart("ada"), Cart("bob")
    first.add("tea", 450)
    first.redeem("WELCOME", 100)
    second.add("milk", 120)
    assert [line.article for line in second.lines] == ["milk"]
    assert (first.total, second.total) == (350, 120)


def test_a_saved_cart_stays_as_it_was():
    cart = Cart("ada")
    cart.add("tea", 450)
    saved = cart.saved()
    cart.add("tea", 450)
    cart.add("milk", 120)
    cart.redeem("WELCOME", 100)
    assert saved.lines == [Line("tea", 450, 1)]
    assert saved.total == 450


def test_a_cart_takes_no_hold_of_the_list_that_it_is_made_from():
    lines = [Line("tea", 450)]
    cart = Cart("ada", lines)
    cart.add("milk", 120)
    cart.add("tea", 450)
    assert lines == [Line("tea", 450)]
