"""Peers that no installed package has, written from their papers."""
