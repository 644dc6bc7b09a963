"""Shopping carts."""

from cart.cart import Cart, Line

__all__ = ["Cart", "Line"]
