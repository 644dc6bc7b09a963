from cart import Cart, Line


def test_pieces_of_an_article_share_a_line():
    cart = Cart("ada", [], {})
    cart.add("tea", 450)
    cart.add("tea", 450, 2)
    assert cart.lines == [Line("tea", 450, 3)]
    assert cart.total == 1350


def test_coupons_never_make_a_total_negative():
    cart = Cart("ada", [], {})
    cart.add("tea", 450)
    cart.redeem("WELCOME", 1000)
    assert cart.total == 0
